"""Perplexity: its windows by hand, its value against transformers' own loss."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import BOS, NUM_BYTE_IDS, byte_tokenizer
from tests.helpers.mounting import plugins
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel
from typer.testing import CliRunner

from rackmount import Engine
from rackmount.cli.app import build_app
from rackmount_registry.errors import ConfigError, RackmountError
from rackmount_tools.perplexity import Window, measure_perplexity, windows_of

TEXT = "So she was considering, in her own mind — as well as she could."
SIZE = len(TEXT.encode())

Loss = Callable[[list[int], list[int]], float]


@pytest.fixture(scope="module", params=[False, True], ids=["no BOS", "BOS"])
def reads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel, list[int]]:
    """A model of bytes, what transformers makes of it, and what stands before each text."""
    folder, model = tiny_checkpoint(
        tmp_path_factory.mktemp("bytes"), "llama", vocab_size=NUM_BYTE_IDS
    )
    tokenizer = byte_tokenizer()
    if request.param:
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    tokenizer.save_pretrained(folder)
    return folder, model, [BOS] if request.param else []


def nats(model: PreTrainedModel, ids: list[int], num_scored: int) -> float:
    """The loss of transformers over the last tokens, as a sum."""
    labels = [-100] * (len(ids) - num_scored) + ids[len(ids) - num_scored :]
    batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
    with torch.inference_mode():
        return model(**batch).loss.item() * num_scored


@pytest.mark.parametrize(("context", "stride"), [(63, 62), (32, 16), (20, 19), (7, 1)])
def test_it_is_the_loss_of_transformers(
    reads: tuple[Path, PreTrainedModel, list[int]], context: int, stride: int
) -> None:
    folder, model, bos = reads
    ids, reached, total, count = list(TEXT.encode()), 0, 0.0, 0
    for begin in range(0, SIZE, stride):  # written out as in transformers' docs
        end = min(begin + context - len(bos), SIZE)
        window = bos + ids[begin:end]
        scored = min(end - reached, len(window) - 1)
        total += nats(model, window, scored)
        count += scored
        reached = end
        if end == SIZE:
            break
    with Engine(folder, manager=plugins(), max_model_len=context + 1, device="cpu") as engine:
        found = measure_perplexity(engine, TEXT, context=context, stride=stride)
    assert found.num_tokens == count == found.num_bytes == SIZE - (not bos)
    assert found.nats == pytest.approx(total, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / count, rel=1e-5)


@given(
    size=st.integers(2, 60), context=st.integers(2, 20), bos=st.sampled_from([None, 99]),
    data=st.data(),
)  # fmt: skip
def test_every_token_is_scored_once_with_as_much_before_it_as_there_is_room(
    size: int, context: int, bos: int | None, data: st.DataObject
) -> None:
    before = 0 if bos is None else 1
    stride = data.draw(st.integers(1, context - before))
    windows = windows_of(range(size), context, stride, bos)
    scored: list[int] = []
    for window in windows:
        assert len(window.token_ids) <= context
        assert window.token_ids[:before] == [bos] * before
        text = window.token_ids[before:]
        assert text == list(range(text[0], text[-1] + 1))
        assert 0 < window.num_scored < len(window.token_ids)
        scored += window.token_ids[-window.num_scored :]
    if stride < context - before or bos is not None:
        assert scored == list(range(1 - before, size))
        for window in windows[1:]:
            assert len(window.token_ids) - window.num_scored >= min(
                context - stride, len(window.token_ids) - 1
            )
    else:  # disjoint, and the first of each has nothing before it
        assert scored == [i for i in range(size) if i % stride]


def test_windows_of_a_small_text() -> None:
    assert windows_of([1, 2, 3, 4, 5, 6], 4, 2, None) == [
        Window(token_ids=[1, 2, 3, 4], num_scored=3),
        Window(token_ids=[3, 4, 5, 6], num_scored=2),
    ]
    assert windows_of([1, 2, 3], 3, 2, 9) == [
        Window(token_ids=[9, 1, 2], num_scored=2),
        Window(token_ids=[9, 3], num_scored=1),
    ]


@pytest.mark.parametrize(
    ("ids", "context", "stride", "bos", "refusal"),
    [
        ([1, 2], 8, 9, None, "stride=9 must be 1 to 8, the tokens of text that a window of"),
        ([1, 2], 8, 8, 0, "stride=8 must be 1 to 7, .* behind the one that begins it"),
        ([1, 2], 8, 0, None, "stride=0 must be 1 to 8"),
        ([1], 8, 4, None, "a text of 1 tokens has none that follows another; give 2 or more"),
        ([], 8, 4, 0, "a text of 0 tokens has none that follows another; give 1 or more"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    ids: list[int], context: int, stride: int, bos: int | None, refusal: str
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        windows_of(ids, context, stride, bos)


def test_nan_is_no_perplexity(reads: tuple[Path, PreTrainedModel, list[int]]) -> None:
    with Engine(reads[0], manager=plugins(), max_model_len=33, device="cpu") as engine:
        head = engine.rack.draft.model.lm_head
        head.gemm.prepared[TEXT.encode()[40]] = float("nan")
        with pytest.raises(RackmountError, match=r"the model gives NaN for .* window 1 of 3"):
            measure_perplexity(engine, TEXT, context=32, stride=31 - len(reads[2]))


def run(folder: Path, *more: str) -> Any:
    asked = ["eval", "perplexity", str(folder), "--device", "cpu", *more]
    return CliRunner().invoke(build_app(plugins()), asked)


def test_the_command_writes_what_it_prints(
    reads: tuple[Path, PreTrainedModel, list[int]], tmp_path: Path
) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "record.json"
    text.write_text(TEXT, encoding="utf-8")
    outcome = run(
        reads[0], "--data", str(text), "--context", "32", "--stride", "16", "--max-tokens", "40",
        "--json", str(file),
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    record = json.loads(file.read_text())
    assert f"perplexity {record['perplexity']:.4f}, " in outcome.stdout
    assert "attention_backend:" in outcome.stderr, "what was mounted decides what is measured"
    assert (record["context"], record["stride"], record["max_tokens"]) == (32, 16, 40)
    assert record["tokens"] == record["bytes"] == 40 - (not reads[2])
    assert record["engine"]["arguments"]["enable_prefix_caching"] is False
    assert record["data"]["file"] == "text.txt" and len(record["data"]["sha256"]) == 64


def test_data_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").touch()
    for name in ("latin", "empty", "absent"):
        outcome = run(tmp_path, "--data", str(tmp_path / name))
        assert outcome.exit_code == 2
        assert "must be a file of text in UTF-8" in outcome.output and name in outcome.output


@pytest.mark.parametrize("num_scored", [1, 999, 1000])
def test_it_says_where_tokens_are_few(
    reads: tuple[Path, PreTrainedModel, list[int]], tmp_path: Path, num_scored: int
) -> None:
    """Without BOS the first is not scored; with it a text of one token is."""
    text = tmp_path / "text.txt"
    text.write_text("a" * (num_scored + (not reads[2])))
    outcome = run(reads[0], "--data", str(text), "--stride", "32")
    assert outcome.exit_code == 0, outcome.output
    assert f"({num_scored} tokens, {num_scored} bytes)" in outcome.stdout
    few = f"so few tokens, {num_scored}, says little; give 1000 or more"
    assert (few in outcome.stderr) == (num_scored < 1000)


def record(folder: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    text, file = tmp_path / "text.txt", tmp_path / "record.json"
    text.write_text(TEXT, encoding="utf-8")
    outcome = run(folder, "--data", str(text), "--json", str(file), *more)
    assert outcome.exit_code == 0, outcome.output
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("given", "context", "stride"),
    [
        ((), 63, 62),  # the model knows 64 positions
        (("--context", "32"), 32, 31),
        (("--max-model-len", "20"), 19, 18),
        (("--stride", "5"), 63, 5),
    ],
)
def test_windows_are_by_default_no_larger_than_there_is_room_for(
    reads: tuple[Path, PreTrainedModel, list[int]],
    tmp_path: Path,
    given: tuple[str, ...],
    context: int,
    stride: int,
) -> None:
    found = record(reads[0], tmp_path, *given)
    assert (found["context"], found["stride"]) == (context, stride)
    assert found["tokens"] == SIZE - (not reads[2])


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (("--context", "64"), "context=64 must be at most 63: there is room for 64 tokens"),
        (("--context", "20", "--max-model-len", "20"), "context=20 must be at most 19"),
        (("--context", "32", "--stride", "33"), "stride=33 must be 1 to 32"),
        (("--stride", "64"), "stride=64 must be 1 to 63"),
    ],
)
def test_windows_without_room_are_refused_before_anything_is_loaded(
    reads: tuple[Path, PreTrainedModel, list[int]],
    tmp_path: Path,
    given: tuple[str, ...],
    refusal: str,
) -> None:
    bare = tmp_path / "config.json"
    bare.write_bytes((reads[0] / "config.json").read_bytes())
    outcome = run(bare, "--data", str(bare), *given)
    assert outcome.exit_code == 2
    assert refusal in outcome.stderr
