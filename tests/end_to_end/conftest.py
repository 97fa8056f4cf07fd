from collections.abc import Iterator

import pytest
from tests.helpers.mounting import plugins

from rackmount import Engine


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Engine]:
    """A real model on the reference parts."""
    with Engine(
        "smollm2-135m", manager=plugins(), dtype="float32", device="cpu", num_kv_blocks=256
    ) as engine:
        yield engine
