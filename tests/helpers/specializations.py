"""What Triton would compile, found without a GPU and without compiling. Run as a program, in a
process of its own: the tests' own interprets kernels.

Usage: python -m tests.helpers.specializations experts|router CASE: prints a JSON object with two
lists of what kernels are specialized for, "ahead" of the first launch and "launched".
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tests.helpers.experts import expert_bundle, expert_tokens
from tests.helpers.routing import ROUTINGS, fresh_state, random_bias
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import Plan
from rackmount_moe.triton_router.router import Gate
from rackmount_registry.experts import ExpertUse

Found = dict[str, list[str]]
"""In the order of asking, as often as was asked."""
HIDDEN, WIDTH, TOP_K = 64, 48, 3
TOKENS = (*range(1, 70), *(n + d for n in (128, 256, 512, 1024, 2048, 8192) for d in (-1, 0, 1)))


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


def router(case: str) -> Found:
    """Two layers; `case` names one of `ROUTINGS`."""
    count, routing, biased = ROUTINGS[case]
    gate, weight, slots = Gate(), torch.randn(count, HIDDEN), torch.arange(max(TOKENS)).int()
    rest = routing, random_bias(count) if biased else None
    with recorded() as found:
        for _ in range(2):
            gate.prepare(weight, *rest, slots[:0], fresh_state(count))
        for tokens in TOKENS:
            gate(torch.randn(tokens, HIDDEN), weight, *rest, slots[:tokens], fresh_state(count))
    return found


if __name__ == "__main__":
    found = {"experts": experts, "router": router}[sys.argv[1]](sys.argv[2])
    print(json.dumps(found))
