"""lm_eval's "local-completions" against `rackmount serve`: it reads what the engine computes.

Needs lm_eval with its extra "api", and transformers, beside it. RACKMOUNT_LM_EVAL names its program
where it lives in another environment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import greedy
from tests.helpers.mounting import plugins
from tests.helpers.served import Served, served

from rackmount import Engine

PROGRAM = os.environ.get("RACKMOUNT_LM_EVAL")
COMMAND = [PROGRAM] if PROGRAM else [sys.executable, "-m", "lm_eval"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PROGRAM and find_spec("lm_eval") is None,
        reason="lm_eval is not installed, and RACKMOUNT_LM_EVAL names no program",
    ),
]

MODEL = "smollm2-135m"
TOLERANCE = 1e-3
"""Of sums of a few log-probabilities: float32, in batches of other sizes."""

CHOICES = [
    ("The capital of France is", ["Paris", "Berlin", "Madrid", "Rome"], 0),
    ("Water is made of hydrogen and", ["gold", "oxygen", "sugar"], 1),
    ("The opposite of hot is", ["a loud caf\u00e9 \U0001f600", "green", "cold"], 2),
]
STARTS = ["The capital of France is", "Monday, Tuesday, Wednesday,", "1, 2, 3, 4,"]
UNTIL, MAX_TOKENS = ["\n", "."], 12


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, manager=plugins(), device="cpu", num_kv_blocks=64) as it:
        yield it


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(MODEL, "--device", "cpu", "--max-model-len", "1024") as it:
        yield it


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks "choice" and "words"."""
    folder = tmp_path_factory.mktemp("tasks")
    choices = [dict(zip(("text", "choices", "answer"), row, strict=True)) for row in CHOICES]
    _write(folder, "choice", choices, output_type="multiple_choice", doc_to_choice="choices")
    _write(
        folder,
        "words",
        [{"text": start, "answer": ""} for start in STARTS],
        output_type="generate_until",
        generation_kwargs={"until": UNTIL, "max_gen_toks": MAX_TOKENS},
        metric_list=[{"metric": "exact_match"}],
    )
    return folder


def _write(folder: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "answer",
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task | fields))  # JSON is YAML, too


@pytest.mark.parametrize(
    ("batch_size", "way"),
    [
        (1, {"num_concurrent": 4, "tokenized_requests": False}),
        (4, {"num_concurrent": 1, "tokenized_requests": True}),
    ],
    ids=["texts at once", "batches of ids"],
)
def test_lm_eval_reads_what_the_engine_computes(
    batch_size: int,
    way: dict[str, Any],
    engine: Engine,
    server: Served,
    tasks: Path,
    tmp_path: Path,
) -> None:
    engine.tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = {
        "model": MODEL,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(tmp_path / "tokenizer"),
        "max_length": 1024,
    } | way
    results = evaluate(given, batch_size, tasks, tmp_path)

    assert results["choice"]["acc,none"] == 1
    samples = samples_of(tmp_path, "choice")
    assert len(samples) == len(CHOICES)
    for sample in samples:
        for (logprob, is_greedy), asked in zip(
            sample["filtered_resps"], sample["arguments"].values(), strict=True
        ):
            expected = loglikelihood(engine, asked["arg_0"], asked["arg_1"])
            assert float(logprob) == pytest.approx(expected[0], abs=TOLERANCE)
            assert (is_greedy == "True") == expected[1]

    samples = samples_of(tmp_path, "words")
    answers = {sample["doc"]["text"]: sample["filtered_resps"][0] for sample in samples}
    params = greedy(MAX_TOKENS, stop=UNTIL, ignore_eos=False)
    assert answers == {start: engine.generate(start, params)[0].text for start in STARTS}


def evaluate(given: dict[str, Any], batch_size: int, tasks: Path, folder: Path) -> Any:
    """Results by task; nothing is fetched from anywhere."""
    command = [*COMMAND, "--model", "local-completions", "--tasks", "choice,words"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in given.items())]
    command += ["--batch_size", str(batch_size)]
    command += ["--include_path", str(tasks), "--output_path", str(folder), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | offline | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "API request failed" not in done.stdout  # it tries three times
    (record,) = folder.rglob("results_*.json")
    return json.loads(record.read_text())["results"]


def samples_of(folder: Path, task: str) -> list[Any]:
    (record,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in record.read_text().splitlines()]


def loglikelihood(engine: Engine, context: str, continuation: str) -> tuple[float, bool]:
    """Of a continuation, and whether each of its tokens is the most likely one."""
    ids = engine.tokenizer.encode(context + continuation)
    (output,) = engine.generate(ids, greedy(1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    entries = [it for it in output.prompt_logprobs[len(engine.tokenizer.encode(context)) :] if it]
    return sum(it.logprob for it in entries), all(it.rank == 1 for it in entries)
