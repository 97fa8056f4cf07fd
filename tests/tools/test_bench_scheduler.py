"""The scheduler's benchmark, on loads small enough for a test."""

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rackmount_tools.bench_scheduler import Load, Run, bench
from rackmount_tools.machine import describe_machine


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    app = typer.Typer()
    app.command()(bench)
    arguments = "--requests 3 --requests 5 --context 40 --block-size 4 --rounds 2 --json"
    outcome = CliRunner().invoke(app, arguments.split(), catch_exceptions=False)
    assert outcome.exit_code == 0
    return json.loads(outcome.stdout)


def test_every_pair_of_requests_and_context_has_its_figures(result: dict[str, Any]) -> None:
    assert [(row["requests"], row["context"]) for row in result["loads"]] == [(3, 40), (5, 40)]
    for row in result["loads"]:
        assert set(row["parts_median_us"]) == {"schedule", "build", "update"}
        assert 0 < row["best_round_us"] <= row["median_us"] * 1.5
        assert min(row["parts_median_us"].values()) > 0 and row["mean_us"] > 0


def test_the_result_says_on_what_machine_it_was_taken(result: dict[str, Any]) -> None:
    assert result["machine"] == describe_machine("numpy")
    assert set(result["machine"]) >= {"processor", "cores", "python", "numpy"}
    assert result["command"].split()[0] == "rackmount" and result["steps"] == 8


def test_a_measured_step_decodes_every_request_and_starts_blocks_in_turn() -> None:
    run = Run(Load(num_requests=8, context=64), block_size=4, steps=12)
    grown = []
    for _ in range(12):
        before = run._scheduler.stats
        run.step()
        after = run._scheduler.stats
        assert after.total_computed_tokens - before.total_computed_tokens == 8
        grown.append(after.kv_usage - before.kv_usage)
    assert min(grown) > 0
