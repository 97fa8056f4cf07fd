"""The search for plans: both products apart, for each size of blocks, then whole layers of the
best.

Kernels are compiled in processes, all before the first is timed; what there is no time for is left
out at random.
"""

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver

from rackmount_moe.triton_experts.align import Blocks
from rackmount_moe.triton_experts.candidates import block_sizes, neighbours, tilings
from rackmount_moe.triton_experts.launches import Prepared, converts_fp8
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import BUCKETS, Plan, Table, Tiling
from rackmount_moe.triton_experts.timing import (
    PRODUCTS,
    Timed,
    Which,
    launch_of,
    packed_of,
    tiling_of,
)
from rackmount_moe.triton_experts.tuning import shape_of
from rackmount_registry.errors import ConfigError
from rackmount_registry.experts import ExpertInput

Say = Callable[[str], None]
Key = tuple[Which, int, int, Tiling]
"""What a compiled product depends on."""
Build = Callable[[Iterable[tuple[Which, Plan]]], set[Key]]
"""Compiles products, each once; gives those that failed."""
RANKED, PAIRED = 3, 2
"""Of a product's tilings so many are told, and so many go on to whole layers."""
PRODUCTS_SHARE = 0.8
"""Of the time goes to products alone."""


@dataclass(frozen=True)
class Gpu:
    """What bounds the candidates."""

    shared_memory: int
    """Bytes that a program may have."""
    tma: bool

    @classmethod
    def current(cls) -> "Gpu":
        properties = driver.active.utils.get_device_properties(torch.cuda.current_device())
        return cls(properties["max_shared_mem"], torch.cuda.get_device_capability() >= (9, 0))


class Search:
    """Finds plans for layers that are on the clock."""

    def __init__(self, timed: Timed, build: Build, gpu: Gpu, say: Say) -> None:
        self.timed, self.build, self.gpu, self.say = timed, build, gpu, say
        given = next(iter(timed.inputs.values()))[0]
        self.top_k = given.expert_ids.shape[1]

    def run(self, seconds: float) -> dict[int, Plan]:
        """Number of tokens -> the best plan; those of which nothing runs are left out.

        Args:
            seconds: about so long products and layers are timed; compiling them comes before.
        """
        num_experts = len(self.timed.layers[0].down.values)
        sizes = {n: block_sizes(n, num_experts, self.top_k) for n in self.timed.inputs}
        plans = {
            (which, size): self._candidates(which, size)
            for size in sorted(set(itertools.chain.from_iterable(sizes.values())))
            for which in PRODUCTS
        }
        failed = self.build((which, plan) for (which, _), each in plans.items() for plan in each)
        for (which, _), each in plans.items():
            each[:] = [plan for plan in each if key_of(which, plan) not in failed]
        best: dict[int, Plan] = {}
        end = time.monotonic() + seconds
        for index, num_tokens in enumerate(sizes):
            now = time.monotonic()
            until = now + (end - now) / (len(sizes) - index)
            found = self._search(num_tokens, sizes[num_tokens], plans, until)
            if found is not None:
                best[num_tokens] = found
        return best

    def _candidates(self, which: Which, block_m: int) -> list[Plan]:
        """In an order that mixes all kinds."""
        choices = 1 if which == "gate_up" else self.top_k
        packed = packed_of(self.timed.layers[0], which)
        found = tilings(packed, block_m, choices, self.gpu.shared_memory, tma=self.gpu.tma)
        plans = [Plan(tiling, tiling, block_m) for tiling in found]
        random.Random(0).shuffle(plans)
        return plans

    def _search(
        self,
        num_tokens: int,
        sizes: Sequence[int],
        plans: dict[tuple[Which, int], list[Plan]],
        until: float,
    ) -> Plan | None:
        finalists = []
        for position, size in enumerate(sizes):
            ranked: dict[Which, list[Plan]] = {}
            for turn, which in enumerate(PRODUCTS):
                now = time.monotonic()
                turns_left = 2 * (len(sizes) - position) - turn
                stop = now + PRODUCTS_SHARE * (until - now) / turns_left
                ranked[which] = self._ranked(num_tokens, which, plans[which, size], stop)
            for first, second in itertools.product(
                ranked["gate_up"][:PAIRED], ranked["down"][:PAIRED]
            ):
                finalists.append(replace(second, gate_up=first.gate_up))
        layer_us = partial(self.timed.layer_us, num_tokens)
        times = dict(self._times(finalists, layer_us, None))
        if not times:
            self.say(f"{num_tokens} tokens: nothing runs")
            return None
        near = neighbours(min(times, key=times.__getitem__))
        times |= dict(self._times(near, layer_us, until))
        best = min(times, key=times.__getitem__)
        self.say(f"{num_tokens} tokens: {times[best]:.1f} us, blocks of {best.block_m}")
        return best

    def _ranked(
        self, num_tokens: int, which: Which, plans: Sequence[Plan], until: float
    ) -> list[Plan]:
        """The best ways to make a product, as far as there was time to try."""
        product_us = partial(self.timed.product_us, num_tokens, which)
        times = dict(self._times(plans, product_us, until))
        ranked = sorted(times, key=times.__getitem__)[:RANKED]
        packed = packed_of(self.timed.layers[0], which)
        rate = self.timed.num_bytes(num_tokens, packed) / 1e6
        shown = ", ".join(
            f"{times[p]:.1f} us {rate / times[p]:.2f} TB/s {brief(which, p)}" for p in ranked
        )
        size = plans[0].block_m if plans else "?"
        self.say(f"  {which}, blocks of {size} ({len(times)} of {len(plans)} tried): {shown}")
        return ranked

    def _times(
        self, plans: Iterable[Plan], measure: Callable[[Plan], float], until: float | None
    ) -> Iterator[tuple[Plan, float]]:
        """Of those that run, one at least however late it is. An error that the GPU's context does
        not survive is raised."""
        timed = 0
        for plan in plans:
            if timed and until is not None and time.monotonic() > until:
                return
            try:
                us = measure(plan)
            except (TritonError, RuntimeError) as error:
                self.timed.check_context()
                self.say(f"  cannot run: {plan}: {type(error).__name__} {str(error)[:120]}")
                continue
            timed += 1
            yield plan, us


def brief(which: Which, plan: Plan) -> str:
    """A product's tiling in a few words."""
    tiling = tiling_of(plan, which)
    text = f"[{tiling.block_n} {tiling.block_k} s{tiling.stages} w{tiling.warps}"
    text += f" p{tiling.programs}" if tiling.programs else ""
    text += " tma" if tiling.tma else ""
    text += f" r{tiling.registers}" if tiling.registers else ""
    text += f" prefetch {plan.prefetch}" if which == "gate_up" and plan.prefetch else ""
    return text + "]"


def key_of(which: Which, plan: Plan) -> Key:
    tiling = tiling_of(plan, which)
    return which, plan.block_m, plan.prefetch, replace(tiling, programs=min(1, tiling.programs))


@contextmanager
def building(layer: Prepared, given: ExpertInput, say: Say) -> Iterator[Build]:
    """What compiles products of such a layer and input, into Triton's cache on the disk."""
    spawn = multiprocessing.get_context("spawn")
    job = partial(_build, _on_meta(layer), given.x.dtype, given.expert_ids.shape[1])
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:

        def build(wanted: Iterable[tuple[Which, Plan]]) -> set[Key]:
            pairs = {key_of(*pair): pair for pair in wanted}
            start = time.monotonic()
            futures = {key: pool.submit(job, *pair) for key, pair in pairs.items()}
            failed = set()
            for key, future in futures.items():
                if (error := future.exception()) is not None:
                    failed.add(key)
                    say(f"  cannot be built: {key}: {type(error).__name__} {str(error)[-160:]}")
            say(f"{len(pairs)} kernels built in {time.monotonic() - start:.0f} s")
            return failed

        yield build


def _build(layer: Prepared, dtype: torch.dtype, top_k: int, which: Which, plan: Plan) -> None:
    """Compiles one product as it will be launched. In a process of its own; no memory is taken."""
    x = torch.empty((16, layer.down.rows), dtype=dtype, device="meta")
    ids = x.new_empty((16, top_k), dtype=torch.int32)
    given = ExpertInput(x=x, expert_ids=ids, weights=torch.empty_like(ids, dtype=torch.float32))
    blocks = None
    if plan.block_m:
        experts, count = ids.new_empty(64), ids.new_empty(1)
        blocks = Blocks(experts, ids.new_empty((64, plan.block_m)), count)
    kernel, grid, arguments = launch_of(given, layer, which, plan, blocks)
    early = torch.cuda.get_device_capability() >= (9, 0)
    arguments |= {"COMPILED": True, "PDL": early, "launch_pdl": early}
    if not plan.block_m:
        arguments["CONVERTS"] = converts_fp8(torch.device("cuda"))
    kernel.warmup(grid=grid, **arguments)


def _on_meta(layer: Prepared) -> Prepared:
    """The layer without its memory, for another process."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty_like(tensor, device="meta")

    def packed(weight: Packed) -> Packed:
        return replace(
            weight,
            values=torch.empty_like(weight.values, device="meta"),
            scales=moved(weight.scales),
            zeros=moved(weight.zeros),
            order=moved(weight.order),
        )

    return Prepared(packed(layer.gate_up), packed(layer.down), ())


def tune(
    layers: Sequence[Prepared],
    inputs: Mapping[int, Sequence[ExpertInput]],
    file: Path,
    seconds: float,
    say: Say,
) -> None:
    """See `rackmount_registry.experts.TunableExperts`."""
    check_tokens(inputs)
    known = known_table(file, versions())
    given = next(iter(inputs.values()))[0]
    with building(layers[0], given, say) as build:
        row = Search(Timed(layers, inputs), build, Gpu.current(), say).run(seconds)
    shape = shape_of(layers[0].gate_up, layers[0].down)
    file.write_text(known.extended(shape, row).text())


def versions() -> dict[str, str]:
    """What figures are of."""
    gpu = torch.cuda.get_device_name()
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}


def check_tokens(numbers: Iterable[int]) -> None:
    """Raises ConfigError where tables have no place for some."""
    for number in numbers:
        if number not in BUCKETS:
            raise ConfigError(f"tokens={number} must be a power of two, {BUCKETS[-1]} at most")


def known_table(file: Path, about: Mapping[str, str]) -> Table:
    """What `file` holds, or a table of nothing, which it then holds: so that it is known before
    the search that the result can be written.

    Raises:
        ConfigError: it cannot be written, holds something else, or what was measured elsewhere
            than `about` says.
    """
    known = Table.read(file) if file.exists() else Table(about=about, shapes={})
    for name, here in about.items():
        if (there := known.about.get(name)) != here:
            raise ConfigError(
                f"{file} was measured with {name}={there}, and here it is {here}; choose another "
                "file"
            )
    try:
        file.write_text(known.text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    return known
