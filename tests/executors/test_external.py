"""Ranks that a launcher has started, with programs that hold no model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
from tests.helpers.executors import ask
from rackmount_executors.external import ExternalExecutor
from rackmount_registry.executor import Launch
executor = ExternalExecutor(Launch(
    program="tests.helpers.executors:Toy", codec="tests.helpers.executors:JsonCodec",
    payload=None, num_ranks=2, device="cpu",
))
{use}
executor.close()
print("closed")
"""


def launched(use: str) -> subprocess.CompletedProcess[str]:
    """Two ranks under torchrun."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--standalone", "--no-python", sys.executable, "-c", SCRIPT.format(use=use)),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_ranks_of_a_launcher_begin_the_next_request_while_an_answer_is_pending() -> None:
    done = launched(
        "executor.submit([None, 'later', [0.5, 'sum', [1.0]]])\n"
        "executor.submit([None, 'now', None])\n"
        "assert executor.collect() == [2.0]\n"
        "executor.collect()\n"
        "assert executor.call([None, 'later', [0.1, 'sum', [3.0]]]) == [[6.0]] * 2\n"
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.mark.slow
def test_a_rank_of_a_launcher_whose_pending_answer_fails_ends_all() -> None:
    done = launched(
        "executor.submit([1, 'later', [0.1, 'fail', 'the cause']])\nimport time; time.sleep(60)\n"
    )
    assert done.returncode == 1
    assert "ZeroDivisionError: the cause" in done.stderr
