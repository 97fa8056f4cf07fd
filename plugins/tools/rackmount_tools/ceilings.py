"""What the device reaches where nothing but memory or nothing but arithmetic binds it: measured in
the same run as what is held against it."""

import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch

from rackmount_tools.clocks import clock_of

REPEATS = 20
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
"""Beyond every cache."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    read: float
    """Bytes per second of a sum over memory."""
    copy: float
    """Bytes per second of a copy: those read and those written."""
    matmul: float
    """Floating point operations per second of a large square product in the model's dtype."""
    fp8: float | None = None
    """The same in float8_e4m3fn with a scale for each row and column; None where there is none."""
    int8: float | None = None
    """The same in int8, into int32."""

    @property
    def bandwidth(self) -> float:
        """The better of the two, in bytes per second."""
        return max(self.read, self.copy)

    def rate(self, weight_format: str) -> float:
        """Operations per second of products with weights of a format, tokens rounded as they may
        be."""
        narrow = {"fp8_rows": self.fp8, "fp8_blocks": self.fp8, "int8_rows": self.int8}
        return narrow.get(weight_format) or self.matmul


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, formats: Collection[str] = ()
) -> Ceilings:
    """Takes some gigabytes of a GPU's memory, and gives them back. Of the weight `formats`, those
    of eight bits have a rate of their own, on a GPU that has such arithmetic."""
    num_bytes, size = COPIED_BYTES[device.type], MATMUL_SIZE[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    factor = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(factor)
    read_s = seconds(source.sum, device)
    copy_s = seconds(partial(target.copy_, source), device)
    matmul_s = seconds(partial(torch.mm, factor, factor, out=product), device)
    del source, target, product
    flops = 2 * size**3
    able = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    fp8 = int8 = None
    if able >= (8, 9) and {"fp8_rows", "fp8_blocks"}.intersection(formats):
        fp8 = flops / seconds(_fp8_product(factor), device)
    if able >= (8, 0) and "int8_rows" in formats:
        fine = factor.mul(32).to(torch.int8)
        int8 = flops / seconds(partial(torch._int_mm, fine, fine.t()), device)
    del factor
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Ceilings(
        read=num_bytes / read_s,
        copy=2 * num_bytes / copy_s,
        matmul=flops / matmul_s,
        fp8=fp8,
        int8=int8,
    )


def _fp8_product(factor: torch.Tensor) -> Callable[[], object]:
    fine = factor.to(torch.float8_e4m3fn)
    scales = torch.ones(len(factor), 1, device=factor.device)
    return partial(
        torch._scaled_mm,
        fine,
        fine.t(),
        scale_a=scales,
        scale_b=scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median time of `run` on the device, warmed up; `run` is to take far longer than its
    launch."""
    clock = clock_of(device)
    for _ in range(3):
        run()
    for _ in range(repeats):
        clock.mark()
        run()
    clock.mark()
    return statistics.median(clock.intervals())
