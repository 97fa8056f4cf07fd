"""Triton's interpreter, where numpy has outgrown it."""

import pytest
from triton.runtime import interpreter


def mend_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels loop to bounds that are not constants: Triton 3.6 makes them integers by
    `int(array of one)`, which numpy 2.4 refuses."""
    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def last_program_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the programs of a one-dimensional grid backward: a GPU promises no order."""
    builder = interpreter.interpreter_builder
    original = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: original(builder.grid_dim[0] - 1 - x, y, z)
    )
