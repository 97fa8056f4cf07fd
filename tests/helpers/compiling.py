"""Kernels compiled for a GPU that need not be there. Run as a program, in a process of its own: the
tests' own interprets kernels.

Usage: python -m tests.helpers.compiling few FORMAT GROUP TOKENS BLOCK_N WARPS: prints the PTX of
`few_rows_kernel` for compute capability 9.0, in bfloat16, [4096, 4096].
       python -m tests.helpers.compiling row FORMAT GROUP BLOCK_N STEP WARPS: prints that of
`one_row_kernel`, after the bytes of a thread's stack.
       python -m tests.helpers.compiling held FORMAT GROUP EPILOGUE ZEROS: prints the machine's
code of `held_tokens_kernel`, after the bytes of a thread's stack: ptxas has orders of its own.
EPILOGUE: 0 none, 1 "silu_mul", 2 "add".
       python -m tests.helpers.compiling many FORMAT GROUP: prints that of `dequantize_kernel`.
"""

import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rackmount_quant.kernels.linear import Prepared, plan
from rackmount_quant.kernels.many_rows import arguments_of, dequantize_kernel
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.tuning import AnyTiling, HeldTiling, RowTiling, Tiling

OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compiled(kernel: Any, arguments: dict[str, Any], capability: int) -> Any:
    """As a launch with these arguments would compile it; `capability` is 90 for 9.0."""
    early = capability >= 90
    arguments = arguments | {"COMPILED": True, "PDL": early, "launch_pdl": early}
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
    return triton.compile(source, target=target, options=options)


def stack_of(made: Any) -> int:
    """Bytes of local memory that a thread has."""
    told = told_of(made, knobs.nvidia.cuobjdump.path, "-res-usage")
    return int(re.findall(r"STACK:(\d+)", told)[0])


def machine_code_of(made: Any) -> str:
    return told_of(made, knobs.nvidia.nvdisasm.path, "-c")


def told_of(made: Any, *command: str) -> str:
    """What a program of CUDA's says of the compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
    return told.stdout


def main(way: str, form: str, group: int, *sizes: int) -> None:
    n = k = 4096
    on = {"device": "meta"}
    scale = torch.float16 if group else torch.float32
    epilogue, zeros = sizes if way == "held" else (0, group > 0)
    shape = (k // 128, n, 16) if form == "int4" else (n, k // 4)
    packed = Packed(
        format=form,  # type: ignore[arg-type]
        words=torch.empty(shape, dtype=torch.int32, **on),
        scales=torch.empty((n, k // group) if group else n, dtype=scale, **on),
        zeros=torch.empty((n, k // group), dtype=torch.int16, **on) if zeros else None,
        ratios=torch.empty((k // group, n), **on) if group else None,
        order=None,
        n=n,
        k=k,
        group=group,
    )
    if way == "many":
        out = torch.empty((n, k), dtype=torch.bfloat16, **on)
        print(compiled(dequantize_kernel, arguments_of(packed, out), 90).asm["ptx"])
        return
    arrivals = torch.empty(n, dtype=torch.int32, **on)
    prepared = Prepared(packed=packed, arrivals=arrivals, tilings={})
    tokens: int
    tiling: AnyTiling
    if way == "row":
        tokens, tiling = 1, RowTiling(*sizes)
    elif way == "held":
        tokens, tiling = 8, HeldTiling()
    else:
        tokens, block_n, warps = sizes
        tiling = Tiling(block_n, 128, 4, stages=4, warps=warps, prefetch=2, registers=None)
    columns = n // 2 if epilogue == 1 else n
    x, out = (torch.empty((tokens, size), dtype=torch.bfloat16, **on) for size in (k, columns))
    residual = out if epilogue == 2 else None
    kernel, _, arguments = plan(tiling, x, prepared, None, residual, out, epilogue == 1)
    made = compiled(kernel, arguments, 90)
    if way in ("row", "held"):
        print(stack_of(made))
    print(machine_code_of(made) if way == "held" else made.asm["ptx"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
