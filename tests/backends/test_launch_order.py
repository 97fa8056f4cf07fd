"""When kernels let the next one start: see `rackmount_registry.device.launch`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("backends", "quant", "moe")
NO_PRODUCT_FOLLOWS = {"build_batch_kernel", "survey_kernel", "choose_kernel"}
"""They stand at the ends of a step."""
ATTENTION_FOLLOWS = {"rotary_write_kernel"}
"""Of several tokens it says so at once, of few when it has waited."""


def kernels() -> Iterator[tuple[str, list[str]]]:
    """Names, and in which order each calls what."""
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            for function in ast.walk(ast.parse(file.read_text())):
                if isinstance(function, ast.FunctionDef):
                    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                    calls.sort(key=lambda call: (call.lineno, call.col_offset))
                    names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
                    order = [name for name in names if name.startswith("gdc_")]
                    if order:
                        yield function.name, order


@pytest.mark.parametrize(("name", "order"), list(kernels()))
def test_kernels_wait_before_the_next_may_start(name: str, order: list[str]) -> None:
    assert set(order) <= {"gdc_wait", "gdc_launch_dependents"}
    waits_first = order[0] == "gdc_wait"
    assert waits_first != (name in NO_PRODUCT_FOLLOWS | ATTENTION_FOLLOWS)
    spoken = order.count("gdc_launch_dependents") - (name in ATTENTION_FOLLOWS)
    assert order.count("gdc_wait") >= spoken


def test_all_kernels_are_found() -> None:
    found = {name for name, _ in kernels()}
    assert found >= NO_PRODUCT_FOLLOWS | {"few_rows_kernel", "norm_kernel", "round_kernel"}
