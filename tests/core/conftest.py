"""Invariants that several tests of the core check."""

from collections.abc import Callable

import pytest
import torch
from tests.helpers import scheduling

from rackmount.scheduling.block_pool import BlockPool


@pytest.fixture(scope="session")
def assert_pool_conserved() -> Callable[[BlockPool], None]:
    """Every block is held or on the free list, once; every name leads to its block."""
    return scheduling.assert_pool_conserved


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """More threads would only wait for each other over such small tensors."""
    torch.set_num_threads(1)
