"""What holds for every test."""

import os
import re
import sys
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Only the GPU lane sees a GPU: the others are of the CPU, on whatever machine they run.

    One thread each: several workers with several threads would fight over the cores. Triton
    reads TRITON_INTERPRET as it is imported, so it is set before any test module is: kernels then
    run in its interpreter, on tensors of the CPU.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not asks_for_gpu(config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"


def asks_for_gpu(markexpr: str) -> bool:
    """Whether `-m` names the tests that need a GPU, and not to leave them out."""
    return re.search(r"(?<!\bnot )\bgpu\b", " ".join(markexpr.split())) is not None


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Where a test module has imported it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "triton.runtime.interpreter" in sys.modules:
            from tests.helpers.interpreter import patch_once

            patch_once(monkeypatch)
        yield
