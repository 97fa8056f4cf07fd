from collections.abc import Iterator

import pytest
import torch
from tests.helpers.mounting import plugins

from rackmount import Engine


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """More threads would only wait for each other where several tests share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Engine]:
    """A real model on the reference parts."""
    with Engine(
        "smollm2-135m", manager=plugins(), dtype="float32", device="cpu", num_kv_blocks=256
    ) as engine:
        yield engine
