"""Kernels compiled for a GPU that need not be there. Run as a program, in a process of its own: the
tests' own interprets kernels.

Usage: python -m tests.helpers.compiling FORMAT GROUP TOKENS BLOCK_N WARPS: prints the PTX of
`few_rows_kernel` for compute capability 9.0, in bfloat16, [4096, 4096].
"""

import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rackmount_quant.kernels.few_rows import few_rows_kernel
from rackmount_quant.kernels.linear import Prepared, plan
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.tuning import Tiling

OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int16: "*i16",
}


def ptx_of(kernel: Any, arguments: dict[str, Any], capability: int) -> str:
    """As a launch with these arguments would compile it."""
    arguments = arguments | {"COMPILED": True, "PDL": True, "launch_pdl": True}
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    signature, constants, facts = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        tensor = isinstance(value, Tensor)
        signature[parameter.name] = TYPES[value.dtype] if tensor else "i32"
        if tensor or (value % 16 == 0 and not parameter.do_not_specialize):
            facts[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, facts)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).asm["ptx"]


def main(form: str, group: int, tokens: int, block_n: int, warps: int) -> None:
    n = k = 4096
    on = {"device": "meta"}
    shape = (k // 128, n, 16) if form == "int4" else (n, k // 4)
    packed = Packed(
        format=form,  # type: ignore[arg-type]
        words=torch.empty(shape, dtype=torch.int32, **on),
        scales=torch.empty((k // group, n) if group else n, **on),
        zeros=torch.empty((k // group, n), dtype=torch.int16, **on) if group else None,
        order=None,
        n=n,
        k=k,
        group=group,
    )
    arrivals = torch.empty(n, dtype=torch.int32, **on)
    prepared = Prepared(packed=packed, arrivals=arrivals, tilings={})
    x, out = (torch.empty((tokens, size), dtype=torch.bfloat16, **on) for size in (k, n))
    tiling = Tiling(block_n, 128, 4, stages=4, warps=warps, prefetch=2, registers=None)
    _, arguments = plan(tiling, x, prepared, None, None, out, False)
    print(ptx_of(few_rows_kernel, arguments, 90))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
