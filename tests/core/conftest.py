"""Invariants that several tests of the core check."""

from collections.abc import Callable

import pytest
from tests.helpers import scheduling

from rackmount.scheduling.block_pool import BlockPool


@pytest.fixture(scope="session")
def assert_pool_conserved() -> Callable[[BlockPool], None]:
    """Every block is held or on the free list, once; every name leads to its block."""
    return scheduling.assert_pool_conserved
