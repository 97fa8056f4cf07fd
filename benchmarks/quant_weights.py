"""Random quantized weights for benchmarks, and the clock over copies of them.

A product is timed as decoding runs it: kernel after kernel in one CUDA graph, each of which may
start before the one before has ended, over copies of the weight that together are more than four
times the L2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from decode_gemm import ROTATED_BYTES, graph_us
from torch import Tensor

from rackmount_quant.kernels.fp8 import Fp8Linear
from rackmount_quant.kernels.grouped import GroupedLinear
from rackmount_quant.kernels.int8 import ROWS_BY, Int8Linear
from rackmount_quant.kernels.linear import Prepared, QuantizedLinear
from rackmount_quant.kernels.rounding import RoundedRows, Rounding
from rackmount_quant.kernels.tuning import BUCKETS, AnyTiling
from rackmount_registry.formats import EPILOGUES, Weight

DTYPE = torch.bfloat16


def integers(n: int, k: int, group: int, zeros: bool = False, order: bool = False) -> Weight:
    """4 bits in groups, some columns of which are padding in act-order."""
    words = torch.randint(-(1 << 31), 1 << 31, (n, -(-k // 8)), device="cuda")
    tensors = {"values": words.int(), "scales": _scales(n, -(-k // group)).half() / 7}
    if zeros:
        tensors["zeros"] = torch.randint(0, 16, tensors["scales"].shape, device="cuda").byte()
    inputs = k
    if order:
        inputs, places = k - 5, torch.randperm(k, device="cuda").int()
        tensors["order"] = places.where(places < inputs, -1)
    return Weight("int4_groups", tensors, (n,), inputs, group)


def integers8(n: int, k: int, group: int) -> Weight:
    values = torch.randint(0, 256, (n, k), device="cuda").byte()
    scales = _scales(n, -(-k // group)) / 100
    return Weight("int8_groups", {"values": values, "scales": scales}, (n,), k, group)


def rows8(n: int, k: int, activation: Any = "token") -> Weight:
    values = torch.randint(-127, 128, (n, k), device="cuda").to(torch.int8)
    tensors = {"values": values, "scales": _scales(n)[:, 0] / 100}
    return Weight("int8_rows", tensors, (n,), k, activation=activation)


def floats(n: int, k: int, activation: Any = "token") -> Weight:
    tensors = {"values": _e4m3(n, k), "scales": _scales(n)[:, 0] / 100}
    if activation == "tensor":
        tensors["input_scale"] = torch.tensor([0.02], device="cuda")
    return Weight("fp8_rows", tensors, (n,), k, activation=activation)


def blocks(n: int, k: int, activation: Any = "group", parts: tuple[int, ...] = ()) -> Weight:
    parts = parts or (n,)
    scales = _scales(sum(-(-part // 128) for part in parts), -(-k // 128)) / 100
    return Weight(
        "fp8_blocks", {"values": _e4m3(n, k), "scales": scales}, parts, k, activation=activation
    )


def _scales(rows: int, columns: int = 1) -> Tensor:
    return 0.02 * (0.5 + torch.rand(rows, columns, device="cuda"))


def _e4m3(n: int, k: int) -> Tensor:
    return (100 * torch.randn(n, k, device="cuda")).clamp(-448, 448).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Format:
    """A weight format with its kernel."""

    kernel: Callable[..., QuantizedLinear]
    make: Callable[[int, int], Weight]
    rounded: Rounding | None = None
    """How inputs of few rows are rounded; None: not at all."""


FORMATS = {
    "int4": Format(GroupedLinear, lambda n, k: integers(n, k, 128)),
    "int4-64": Format(GroupedLinear, lambda n, k: integers(n, k, 64)),
    "int4-32": Format(GroupedLinear, lambda n, k: integers(n, k, 32)),
    "int4-rows": Format(GroupedLinear, lambda n, k: integers(n, k, k)),
    "int4-zeros": Format(GroupedLinear, lambda n, k: integers(n, k, 128, zeros=True)),
    "int8-groups": Format(GroupedLinear, lambda n, k: integers8(n, k, 128)),
    "fp8": Format(Fp8Linear, lambda n, k: floats(n, k, "plain")),
    "fp8-blocks": Format(Fp8Linear, lambda n, k: blocks(n, k, "plain")),
    "int8": Format(Int8Linear, lambda n, k: rows8(n, k, "plain")),
    "fp8-rounded": Format(Fp8Linear, floats, Rounding(dtype=torch.float8_e4m3fn, per="token")),
    "fp8-blocks-rounded": Format(
        Fp8Linear, blocks, Rounding(dtype=torch.float8_e4m3fn, per="group")
    ),
    "int8-rounded": Format(
        Int8Linear, rows8, Rounding(dtype=torch.int8, per="token", rows_by=ROWS_BY)
    ),
}


def kernel_of(weight: Weight) -> QuantizedLinear:
    kernels = {"int4_groups": GroupedLinear, "int8_groups": GroupedLinear, "int8_rows": Int8Linear}
    return kernels.get(weight.format, Fp8Linear)()


def call(
    kernel: QuantizedLinear, prepared: Prepared, x: Tensor | RoundedRows, epilogue: str
) -> Tensor:
    if epilogue == "silu_mul":
        return kernel.run_silu_mul(x, prepared, None)
    if epilogue == "add":
        return kernel.run_add(x, prepared, None, residual_of(len(x), prepared.packed.n))
    return kernel.run(x, prepared, None)


@cache
def residual_of(rows: int, n: int) -> Tensor:
    return torch.randn(rows, n, dtype=DTYPE, device="cuda")


def forced(prepared: Prepared, tiling: AnyTiling | None, rounded: bool = False) -> Prepared:
    """The same weight with one tiling for all products, of rounded inputs or of others."""
    if not rounded:
        return replace(prepared, tilings=_everywhere(tiling))
    many = replace(prepared.many, ways=_everywhere(tiling or "many"))
    return replace(prepared, many=many)


def _everywhere(choice: Any) -> dict[str, tuple[Any, ...]]:
    return {epilogue: (choice,) * len(BUCKETS) for epilogue in ("none", *EPILOGUES)}


class Bench:
    """Copies of weights, and the clock."""

    def __init__(self, samples: int = 3) -> None:
        self.samples = samples
        self._copies: dict[tuple[str, int, int], list[Prepared]] = {}

    def copies(self, form: str, n: int, k: int) -> list[Prepared]:
        if (form, n, k) not in self._copies:
            kernel, make = FORMATS[form].kernel(lambda *_: None), FORMATS[form].make
            first = kernel.prepare(make(n, k))
            count = max(2, -(-ROTATED_BYTES // bytes_of(first)))
            self._copies[form, n, k] = [first, *(kernel.prepare(make(n, k)) for _ in range(count))]
        return self._copies[form, n, k]

    def us(
        self,
        form: str,
        n: int,
        k: int,
        rows: int,
        epilogue: str,
        tiling: AnyTiling | None,
    ) -> float:
        """Microseconds of a product, one of many in a graph; infinite where it cannot run. A format
        with rounded inputs is given them rounded, as by a norm; where a residual is added, what
        stands before has not always a pass that could round, and one of its own counts."""
        kernel, copies = FORMATS[form].kernel(), self.copies(form, n, k)
        rounded = FORMATS[form].rounded
        forms = [
            forced(copy, tiling, rounded is not None) for copy in copies * -(-8 // len(copies))
        ]
        x = torch.randn(rows, k, dtype=DTYPE, device="cuda")
        if rounded is not None and epilogue != "add":
            x = rounded.round(x)
        try:
            call(kernel, forms[0], x, epilogue)
            return graph_us([partial(call, kernel, p, x, epilogue) for p in forms], self.samples)
        except Exception as error:  # told, and the next one is tried
            print(f"FAILED: {form} {n}x{k} rows {rows} {epilogue} {tiling}: {error!r:.200}")
            return float("inf")


def bytes_of(prepared: Prepared) -> int:
    """Of values, scales and zeros, as the format has them."""
    packed = prepared.packed
    tensors = (packed.words, packed.scales, packed.zeros)
    return sum(each.nbytes for each in tensors if each is not None)
