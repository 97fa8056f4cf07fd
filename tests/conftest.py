"""What holds for every test."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Only the GPU lane sees a GPU: the others are of the CPU, on whatever machine they run."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
