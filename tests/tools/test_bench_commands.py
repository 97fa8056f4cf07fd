"""Every benchmark, on a model that takes no time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rackmount_registry.errors import RackmountError
from rackmount_tools.bench_startup import PHASES, measure
from rackmount_tools.plugin import cli_commands

RecordOf = Callable[..., dict[str, Any]]


def test_throughput_is_output_over_time(record_of: RecordOf) -> None:
    record = record_of("throughput --num-prompts 5 --input-len 6 --output-len 4")
    assert (record["prompt_tokens"], record["output_tokens"]) == (30, 20)
    assert record["output_tokens_per_s"] == 20 / record["seconds"]
    assert record["total_tokens_per_s"] == 50 / record["seconds"]
    assert record["share"] == record["floor_seconds"] / record["seconds"]


def test_interference_is_measured_with_and_without_long_prompts(record_of: RecordOf) -> None:
    record = record_of(
        "interference --num-requests 2 --input-len 4 --output-len 6 --long-len 40 "
        "--max-num-batched-tokens 16 --block-size 4"
    )
    alone, beside = record["loads"]
    assert (alone["load"], beside["load"]) == ("alone", "with long prompts")
    for row in record["loads"]:
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"] <= row["itl_max_ms"]
        assert row["share"] == pytest.approx(row["floor_ms"] / row["itl_p50_ms"])
        assert row["tokens_per_s"] > row["output_tokens_per_s"] > 0
    assert record["preemptions"] == 0


def test_a_start_is_told_phase_by_phase(tiny: Path) -> None:
    # As JSON leaves it: tuples are lists.
    arguments = {"load_format": "dummy", "device": "cpu", "max_model_len": None, "auto_plugins": []}
    phases = measure(str(tiny), json.loads(json.dumps(arguments)), 5)
    assert set(phases) == {*PHASES, "total"}
    assert min(phases.values()) > 0
    assert phases["total"] == pytest.approx(sum(phases[name] for name in PHASES))


def test_a_start_that_fails_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RackmountError, match="the process that was timed ended with 1"):
        measure(str(tmp_path), {"load_format": "dummy", "max_model_len": None}, 5)
    assert "CheckpointError" in capfd.readouterr().err


def test_commands_are_offered_by_name_without_being_imported() -> None:
    names = {(command.group, command.name): command.factory for command in cli_commands()}
    benches = ["latency", "throughput", "interference", "startup", "kernels", "scheduler", "serve"]
    assert names == {("bench", name): f"rackmount_tools.bench_{name}:bench" for name in benches} | {
        ("eval", "perplexity"): "rackmount_tools.eval_perplexity:evaluate",
        (None, "calibrate"): "rackmount_tools.calibrate:calibrate",
    }
