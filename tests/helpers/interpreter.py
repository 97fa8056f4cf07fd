"""Triton's interpreter, where numpy has outgrown it, and where it does the same over and over."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a launch patch `triton.language` once: Triton 3.6 does so again at every call of a
    function by a kernel, which is half of the time that most kernels take."""
    original = interpreter._patch_lang
    patched: set[ModuleType] = set()

    def patch(fn: Callable[..., Any]) -> interpreter._LangPatchScope:
        modules = {each for each in fn.__globals__.values() if each is tl or each is tl.core}
        if patched and modules <= patched:
            return interpreter._LangPatchScope()
        scope = original(fn)
        if not patched:  # a kernel is launched; scopes of the functions it calls are never restored
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(modules)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch)


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


TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
}
BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}
"""Bytes of a float -> integers of that size."""


def mend_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds narrower floats to nearest, as GPUs do: Triton 3.6 cuts bits off, and makes eight-bit
    floats below the normal ones wrong."""
    original = interpreter._convert_float

    def convert(array, from_type, to_type, rounding):
        names = from_type.name, to_type.name
        cuts = rounding is not None and "RTZ" in str(rounding)
        if cuts or not set(names) <= TORCH_DTYPES.keys():
            return original(array, from_type, to_type, rounding)
        source, target = (TORCH_DTYPES[name] for name in names)
        if source.itemsize in BITS:
            raw = torch.from_numpy(
                np.ascontiguousarray(array).view(BITS[source.itemsize][0]).copy()
            )
        else:
            raw = torch.from_numpy(np.ascontiguousarray(array))
        out = raw.view(source).to(target)
        if target.itemsize in BITS:
            out = out.view(BITS[target.itemsize][1])
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[target.itemsize]
        return out.numpy().view(unsigned).reshape(array.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
