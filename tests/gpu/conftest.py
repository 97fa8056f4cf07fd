"""What holds for every test on a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.reduces import wrong_reduces
from triton.compiler import CompiledKernel


@pytest.fixture(scope="session", autouse=True)
def sums_are_added_up() -> Iterator[None]:
    """By every kernel that the tests compile, as far as the compiler's output shows."""
    made: dict[str, str] = {}
    create = CompiledKernel.__init__

    def recorded(kernel: CompiledKernel, *given: Any, **named: Any) -> None:
        create(kernel, *given, **named)
        made[kernel.asm["ttgir"]] = kernel.name

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CompiledKernel, "__init__", recorded)
        yield
    wrong = {f"{name}: {each}" for ir, name in made.items() for each in wrong_reduces(ir)}
    assert not wrong, wrong
