"""Whatever the load, every request's answer is that of its run alone: on a real model."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import tiny_engine
from tests.helpers.loads import VOCAB, Load, check, loads, watched


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), request.param, vocab_size=VOCAB, hidden_size=32
    )[0]


@pytest.mark.timeout(600)  # a failure takes minutes to shrink
@settings(max_examples=40, deadline=None, derandomize=True)
@given(load=loads())
def test_every_load_gives_every_request_the_answer_of_its_run_alone(
    load: Load, folder: Path
) -> None:
    check(load, folder, watched(tiny_engine(folder, dtype="float64", **load.engine)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500, deadline=None)
@given(load=loads())
def test_every_one_of_many_loads_gives_every_request_the_answer_of_its_run_alone(
    load: Load, folder: Path
) -> None:
    check(load, folder, watched(tiny_engine(folder, dtype="float64", **load.engine)))
