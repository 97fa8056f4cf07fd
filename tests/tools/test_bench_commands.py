"""Every benchmark, on a model that takes no time."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rackmount_registry.errors import RackmountError
from rackmount_tools.bench_startup import PHASES, measure
from rackmount_tools.ceilings import Ceilings
from rackmount_tools.plugin import cli_commands
from rackmount_tools.record import print_ceilings

RecordOf = Callable[..., dict[str, Any]]
RefusalOf = Callable[..., str]
DUMMY = "{model} --load-format dummy --device cpu"


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


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ("--no-enable-mixed-steps", "enable_mixed_steps=False computes all prompts before"),
        ("--num-requests 16 --max-num-batched-tokens 16", "num_requests=16 .* at least 17"),
    ],
)
def test_interference_that_would_measure_nothing_is_refused(
    refusal_of: RefusalOf, options: str, rule: str
) -> None:
    assert re.search(rule, refusal_of(f"bench interference {DUMMY} {options}"))


def test_a_start_is_told_phase_by_phase(tiny: Path) -> None:
    # As JSON leaves it: tuples are lists.
    arguments = {"load_format": "dummy", "device": "cpu", "max_model_len": None, "auto_plugins": []}
    row = measure(str(tiny), json.loads(json.dumps(arguments)), 5)
    assert set(row) == {*PHASES, "total", "attention", "parts", "decode_sizes", "mixed_sizes"}
    assert min(row[name] for name in PHASES) > 0
    assert row["total"] == pytest.approx(sum(row[name] for name in PHASES))
    assert row["attention"] == "torch" and "attention_backend: torch" in row["parts"]


def test_a_start_that_fails_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = {"load_format": "dummy", "max_model_len": None}
    with pytest.raises(RackmountError, match="holds no file that a mounted reader takes"):
        measure(str(tmp_path), arguments, 5)
    assert capfd.readouterr().err == ""
    with pytest.raises(RackmountError, match="the process that was timed ended with 1"):
        measure(str(tmp_path), arguments, "many")  # type: ignore[arg-type]
    assert "TypeError" in capfd.readouterr().err


def test_commands_are_offered_by_name_without_being_imported() -> None:
    names = {(command.group, command.name): command.factory for command in cli_commands()}
    benches = ["latency", "throughput", "interference", "startup", "kernels", "scheduler", "serve"]
    assert names == {("bench", name): f"rackmount_tools.bench_{name}:bench" for name in benches} | {
        ("eval", "perplexity"): "rackmount_tools.eval_perplexity:evaluate",
        (None, "calibrate"): "rackmount_tools.calibrate:calibrate",
    }


@pytest.mark.parametrize(
    "command",
    [
        f"bench latency {DUMMY} --json",
        f"bench throughput {DUMMY} --json",
        f"bench interference {DUMMY} --json",
        f"bench startup {DUMMY} --json",
        f"bench kernels {DUMMY} --json",
        f"bench kernels {DUMMY} --tune",
        "bench serve --json",
        "bench serve --plot",
        "eval perplexity {model} --data {model} --json",
    ],
)
def test_a_file_that_cannot_be_written_is_refused_at_the_start(
    refusal_of: RefusalOf, tmp_path: Path, command: str
) -> None:
    option = command.rpartition("--")[2]
    rule = f"error: {option}='{{}}' must be a file that can be written, and"
    absent = tmp_path / "absent"
    told = refusal_of(f"{command} {absent}/x.json")
    assert rule.format(absent / "x.json") + f" there is no folder '{absent}'" in told
    assert rule.format(tmp_path) + " is a folder" in refusal_of(f"{command} {tmp_path}")


@pytest.mark.parametrize("present", [False, True])
def test_a_file_that_may_not_be_written_is_refused(
    refusal_of: RefusalOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: bool
) -> None:
    file = tmp_path / "x.json"
    if present:
        file.touch()
    place = file if present else tmp_path
    # Root may write everywhere, whatever the modes say.
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (place, os.W_OK))
    assert "must be a file that can be written, and that is not permitted" in refusal_of(
        f"bench latency {DUMMY} --json {file}"
    )
    assert file.exists() == present


@pytest.mark.parametrize(
    ("command", "options", "longest"),
    [
        (
            "latency --input-len 200 --output-len 90 --batch-sizes 1,2",
            "input_len=200, output_len=90, batch_sizes='1,2', tokens until all decode=3",
            293,
        ),
        (
            "throughput --input-len 200 --output-len 57",
            "workload='uniform', num_prompts=256, input_len=200, output_len=57",
            257,
        ),
        ("throughput --workload nano", "workload='nano'", 2048),
        ("interference --input-len 4 --output-len 8 --num-requests 1", "long_len=8192", 8193),
        (
            "interference --long-len 16 --num-requests 1 --input-len 250 --output-len 8",
            "num_requests=1, input_len=250, output_len=8, tokens until all decode=3",
            261,
        ),
    ],
)
def test_requests_that_are_too_long_are_refused_by_the_options_that_make_them(
    refusal_of: RefusalOf, command: str, options: str, longest: int
) -> None:
    name, _, rest = command.partition(" ")
    text = refusal_of(f"bench {name} {DUMMY} {rest}")
    assert text.startswith(f"error: {options}: requests have up to {longest} tokens, and")
    assert f"max_model_len={longest} is above what the model knows; choose at most 256" in text
    asked = f"bench {name} {DUMMY} {rest} --max-model-len 100"
    assert f"up to {longest} tokens, and max_model_len=100 is below that" in refusal_of(asked)


@pytest.mark.parametrize("command", ["latency", "throughput", "interference"])
def test_a_length_of_0_is_below_that(refusal_of: RefusalOf, command: str) -> None:
    assert "max_model_len=0 is below" in refusal_of(f"bench {command} {DUMMY} --max-model-len 0")


@pytest.mark.parametrize(
    ("command", "given", "needed"),
    [
        ("latency --batch-sizes 2,4", 3, "4 requests at once of batch_sizes='2,4'"),
        ("latency --batch-sizes 1", -5, "1 requests at once of batch_sizes='1'"),
        ("interference --num-requests 1", 8, "9 requests at once of num_requests=1 and 8 long"),
    ],
)
def test_fewer_requests_at_once_than_are_needed_are_refused(
    refusal_of: RefusalOf, command: str, given: int, needed: str
) -> None:
    name, _, rest = command.partition(" ")
    text = refusal_of(f"bench {name} {DUMMY} {rest} --max-num-seqs {given}")
    assert f"max_num_seqs={given} is below the {needed}" in text


def test_requests_may_be_as_long_as_the_model_knows(record_of: RecordOf) -> None:
    record = record_of("throughput --num-prompts 1 --input-len 250 --output-len 6")
    assert record["output_tokens"] == 6


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--num-prompts 2", "num_prompts=2"),
        ("--input-len 4 --output-len 5", "input_len=4, output_len=5"),
    ],
)
def test_options_of_another_workload_are_refused(
    refusal_of: RefusalOf, given: str, named: str
) -> None:
    text = refusal_of(f"bench throughput {DUMMY} --workload nano {given}")
    assert f"{named}: workload='nano' has its own prompts and lengths" in text


def test_a_vocabulary_without_the_ids_of_a_workload_is_refused(
    refusal_of: RefusalOf, tiny: Path, tmp_path: Path
) -> None:
    config = json.loads(tiny.read_text()) | {"max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refusal_of(
        f"bench throughput {tmp_path} --load-format dummy --device cpu --workload nano"
    )
    assert "needs a vocabulary of 10001 tokens, and the model has 97; choose workload='un" in text


def test_ceilings_are_told_with_their_units(capsys: pytest.CaptureFixture[str]) -> None:
    print_ceilings(Ceilings(read=4.2e12, copy=3.914e12, matmul=7.6e14, fp8=1.3e15, int8=1.2e15))
    assert capsys.readouterr().out == (
        "ceilings: read 4.2 TB/s, copy 3.914 TB/s, matmul 760 TFLOP/s, fp8 1,300 TFLOP/s, "
        "int8 1,200 TOP/s\n"
    )


@pytest.mark.parametrize("command", ["latency", "kernels"])
def test_an_unknown_model_is_refused_with_the_shapes(refusal_of: RefusalOf, command: str) -> None:
    text = refusal_of(f"bench {command} qwen3-30b-a3b-16")
    assert "model='qwen3-30b-a3b-16' is neither" in text
    assert "nor a shape (did you mean 'qwen3-30b-a3b-16l'?); shapes: llama-8b, mixtral" in text
