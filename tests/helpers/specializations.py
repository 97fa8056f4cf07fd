"""What Triton would compile, found without a GPU and without compiling. Run as a program, in a
process of its own: the tests' own interprets kernels. `find` does it.

Usage: python -m tests.helpers.specializations CASE..., each as "experts CASE", "linear CASE" or
"router CASE": prints for each a JSON object with two lists of what kernels are specialized for,
"ahead" of the first launch and "launched".
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from tests.helpers.experts import expert_bundle, expert_tokens
from tests.helpers.routing import ROUTINGS, fresh_state, random_bias
from tests.helpers.weights import fp8_blocks, fp8_rows, int8_rows, int_groups
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import Plan
from rackmount_moe.triton_router.router import Gate, NormGate
from rackmount_quant.kernels import tuning as quant_tuning
from rackmount_quant.kernels.fp8 import Fp8Linear
from rackmount_quant.kernels.grouped import GroupedLinear
from rackmount_quant.kernels.int8 import Int8Linear
from rackmount_quant.kernels.linear import QuantizedLinear
from rackmount_registry.experts import ExpertUse
from rackmount_registry.ops import NORM_GATE_TOKENS

Found = dict[str, list[str]]
"""In the order of asking, as often as was asked."""
HIDDEN, WIDTH, TOP_K = 64, 48, 3
WEIGHTS = {
    "int4 groups": (lambda n: int_groups(4, n, 256, 64), GroupedLinear),
    "int4 wide groups": (lambda n: int_groups(4, n, 1152, 128, zeros=True), GroupedLinear),
    "int4 groups with zeros": (lambda n: int_groups(4, n, 200, 32, zeros=True), GroupedLinear),
    "int8 rows": (lambda n: int8_rows(n, 272), Int8Linear),
    "fp8 rows": (lambda n: fp8_rows(n, 144), Fp8Linear),
    "fp8 blocks": (lambda n: fp8_blocks((n,), 256), Fp8Linear),
}
"""Case -> a weight of so many rows, and the kernel that takes it."""
NUM_SMS = 132
TOKENS = (*range(1, 70), *(n + d for n in (128, 256, 512, 1024, 2048, 8192) for d in (-1, 0, 1)))


def find(program: str, cases: Iterable[str]) -> dict[str, Found]:
    """What a module of helpers prints for its cases, where kernels are not interpreted."""
    asked = list(cases)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.helpers.{program}", *asked],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, map(json.loads, done.stdout.splitlines()), strict=True))


def report(search: Callable[[str], Found], cases: Iterable[str]) -> None:
    """Prints what each case comes to, in a process of its own: a copy of this one, as to import all
    takes longer than to search."""
    for case in cases:
        process = get_context("fork").Process(target=lambda c=case: print(json.dumps(search(c))))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{case} has failed")


def names_of(found: list[str]) -> set[str]:
    """Kernels, by their names without "_kernel"."""
    return {each.split(" ")[0].rpartition(".")[2].removesuffix("_kernel") for each in found}


class Hopper:
    """As much of a driver as Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def recorded() -> Iterator[Found]:
    """Nothing is compiled or launched in here."""
    found: Found = {"ahead": [], "launched": []}

    def note(*, key: Any, fn: Any, is_manual_warmup: bool, **_: Any) -> bool:
        found["ahead" if is_manual_warmup else "launched"].append(f"{fn.name} {key}")
        return True  # as if it need not be compiled

    driver.set_active(Hopper())
    knobs.runtime.jit_cache_hook = note
    yield found


def tabulated(gate_up: Packed, down: Packed, bucket: int) -> Plan:
    """As on an H200."""
    table = tuning.shipped("NVIDIA H200")
    assert table is not None
    row = table.shapes["dense 128x2048x768"]
    return tuning.nearest(row, bucket) or tuning.rule(gate_up, down, bucket)


def experts(case: str) -> Found:
    """Two layers; `case` names one of `FORMATS`, or plans of the H200's table."""
    kernel = TritonExperts(tabulated if case == "tabulated" else tuning.rule)
    name = "dense" if case == "tabulated" else case
    layers = [expert_bundle(name, 6, HIDDEN, WIDTH, torch.float16) for _ in range(2)]
    with recorded() as found:
        use = ExpertUse(top_k=TOP_K, dtype=torch.float16)
        prepared = [kernel.prepare(layer, use) for layer in layers]
        for count in TOKENS:
            given = expert_tokens(count, 6, HIDDEN, TOP_K, torch.float16)
            kernel.run(replace(given, x=given.x.contiguous()), prepared[count % 2])
    return found


def linear(case: str) -> Found:
    """Two layers of each kind, with widths and biases of two kinds; `case` names one of `WEIGHTS`,
    or is "rounded": from nine rows on, in the layers that can be. With "one row: " before it a
    single row has a kernel of its own, with "held: " programs hold the tokens of up to
    eight."""
    *other, case = case.split(": ")
    held = quant_tuning.HeldTiling()

    def choose(packed: Any, epilogue: str, bucket: int) -> Any:
        if other == ["one row"] and bucket == 1:
            return quant_tuning.RowTiling(8, 2, 4)
        if other == ["held"] and bucket <= quant_tuning.HELD_ROWS and held.takes(packed):
            return held
        return quant_tuning.rule(packed, bucket, NUM_SMS)

    if case == "rounded":
        make = partial(int8_rows, k=272, activation="token")
        part: QuantizedLinear = Int8Linear(
            choose, lambda *given: choose(*given) if given[-1] > 8 else "exact"
        )
    else:
        make, kernel = WEIGHTS[case]
        part = kernel(choose)
    layers = [(make(n), bias) for n, bias in 2 * [(WIDTH, True), (40, True), (40, False)]]
    uses = ("run", "silu_mul", "add")
    with recorded() as found:
        for weight, biased in layers:
            prepared = part.prepare(weight, uses, dtype=torch.float16, bias=biased)
            n, k = weight.out_features, weight.in_features
            bias = torch.randn(n, dtype=torch.float16) if biased else None
            for count in range(1, quant_tuning.RULED_ROWS + 1):
                x, residual = (torch.randn(count, size, dtype=torch.float16) for size in (k, n))
                part.run(x, prepared, bias)
                part.run_silu_mul(x, prepared, bias)
                part.run_add(x, prepared, bias, residual)
    return found


def router(case: str) -> Found:
    """Two layers; `case` names one of `ROUTINGS`."""
    count, routing, biased = ROUTINGS[case]
    gate, weight, slots = Gate(), torch.randn(count, HIDDEN), torch.arange(max(TOKENS)).int()
    norm_gate, norm = NormGate(), (torch.ones(HIDDEN), 1e-6)
    rest = routing, random_bias(count) if biased else None
    with recorded() as found:
        for _ in range(2):
            gate.prepare(weight, *rest, slots[:0], fresh_state(count))
            norm_gate.prepare(weight[:1], *norm, weight, *rest, slots[:0], fresh_state(count))
        for tokens in TOKENS:
            x, given = torch.randn(tokens, HIDDEN), (*rest, slots[:tokens], fresh_state(count))
            gate(x, weight, *given)
            if tokens <= NORM_GATE_TOKENS:
                norm_gate(x, *norm, weight, *given)
    return found


def search(asked: str) -> Found:
    kind, case = asked.split(" ", 1)
    return {"experts": experts, "linear": linear, "router": router}[kind](case)


if __name__ == "__main__":
    report(search, sys.argv[1:])
