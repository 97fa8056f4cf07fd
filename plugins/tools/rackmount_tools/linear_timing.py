"""Linear kernels at the shapes of a model, with the epilogue and the input that a mount with them
would give them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rackmount import Rack
from rackmount_registry.descriptors import LinearKernel
from rackmount_registry.formats import EPILOGUES, PROLOGUES, Rounded, Weight
from rackmount_registry.mount import Draft, random_weight
from rackmount_registry.mount.fuse import GemmSiluMul, fuse
from rackmount_registry.mount.trace import trace
from rackmount_registry.nn import Linear, MergedLinear, OutputHead
from rackmount_registry.nn.linear import Gemm
from rackmount_registry.options import instantiate
from rackmount_registry.plugins import PluginManager
from rackmount_tools.ceilings import Ceilings
from rackmount_tools.kernel_timing import L2_TIMES, bytes_of, num_rotated, seconds_of


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix product of a model, and its like."""

    gemm: Gemm
    prologue: str | None
    """After which operation its input may be made rounded, one of `formats.PROLOGUES`."""
    activated: Gemm | None
    """What alone reads silu(gate) * up of it, and may get that rounded."""
    count: int


def products_of(draft: Draft) -> list[Product]:
    """Every matrix product of a model but those of its experts and routers, by role, shape, format
    and what a kernel with every epilogue and prologue is asked for: `uses` of the mount say so only
    as far as its own kernel goes."""
    gemms = list(_gemms(draft))
    for gemm in gemms:
        gemm.epilogues, gemm.prologues = EPILOGUES, PROLOGUES
    traced = trace(draft.model)
    fuse(traced)
    prologues, activated = _prologues(traced), _activated(traced)
    found: dict[tuple[object, ...], list[Gemm]] = {}
    for gemm in gemms:
        weight, prologue = gemm.weight, prologues.get(id(gemm))
        key = weight.role, weight.parts, weight.in_features, weight.stored, gemm.uses, prologue
        found.setdefault(key, []).append(gemm)
    return [
        Product(
            gemm=alike[0],
            prologue=prologues.get(id(alike[0])),
            activated=activated.get(id(alike[0])),
            count=len(alike),
        )
        for alike in found.values()
    ]


def _gemms(draft: Draft) -> Iterator[Gemm]:
    for socket in draft.sockets:
        match socket:
            case Linear() | OutputHead():
                yield socket.gemm
            case MergedLinear():
                yield from socket.gemms


def _prologues(fused: nn.Module) -> dict[int, str]:
    """By the identity of each product that may get its input rounded."""
    return {
        id(module.reader): "silu_mul" if type(module).__name__.endswith("SiluMul") else "norm"
        for module in fused.modules()
        if isinstance(getattr(module, "reader", None), Gemm)
    }


def _activated(fused: nn.Module) -> dict[int, Gemm | None]:
    """By the identity of each product with the epilogue "silu_mul"."""
    return {
        id(module.gemm): module.reader
        for module in fused.modules()
        if isinstance(module, GemmSiluMul)
    }


def time_linear(
    rack: Rack, manager: PluginManager, ceilings: Ceilings, tokens: Sequence[int], names: list[str]
) -> list[dict[str, Any]]:
    """A row for each product, number of tokens, and kernel that fits, of `names` if there are
    any."""
    rows = []
    for product in products_of(rack.draft):
        stored = product.gemm.weight
        weight = random_weight(stored, device=rack.device, dtype=rack.dtype)
        choice = rack.parts.linear[weight.format]
        fitting = {each.name for each in choice.candidates if each.accepted}
        for name in sorted(fitting.intersection(names) if names else fitting):
            timed = _Timed(rack, manager, product, weight, name)
            for num in tokens:
                row = {
                    "shape": f"{weight.out_features} x {weight.in_features}",
                    "role": stored.role,
                    "format": weight.format,
                    "count": product.count,
                    "kernel": name,
                    "tokens": num,
                }
                rows.append(row | timed.measure(num, ceilings))
    return rows


class _Timed:
    """One kernel over copies of one weight that outgrow the cache."""

    def __init__(
        self, rack: Rack, manager: PluginManager, product: Product, weight: Weight, name: str
    ) -> None:
        offer = manager.find(LinearKernel, name)
        self.part, self.kernel = offer.descriptor, instantiate(offer, rack.options)
        self.product, self.weight = product, weight
        self.dtype, self.device = rack.dtype, rack.device
        uses = product.gemm.uses
        self.epilogue = next((each for each in self.part.epilogues if each in uses), None)
        self.copies = [
            self.kernel.prepare(each, uses if self.epilogue else ("run",))
            for each in self._copies()
        ]
        self.reader = None
        if (
            reader := product.activated
        ) is not None and reader.weight.stored == product.gemm.weight.stored:
            stored = random_weight(reader.weight, device=rack.device, dtype=rack.dtype)
            self.reader = self.kernel.prepare(stored, reader.uses)

    def _copies(self) -> Iterator[Weight]:
        on_cpu = self.device.type == "cpu"
        count = L2_TIMES if on_cpu else num_rotated(bytes_of([self.weight]), self.device, least=2)
        for _ in range(count):
            tensors = {name: each.clone() for name, each in self.weight.tensors.items()}
            yield replace(self.weight, tensors=tensors)

    def measure(self, num: int, ceilings: Ceilings) -> dict[str, Any]:
        """Of so many tokens."""
        weight = self.weight
        x = torch.randn(num, weight.in_features, device=self.device).to(self.dtype)
        given, epilogue = self._rounded(x), self._epilogue_at(num)
        residual = x.new_ones(num, weight.out_features) if epilogue == "add" else None
        run = partial(self._run, given, epilogue, residual)
        took = seconds_of(run, self.device, graph_safe=self.part.graph_safe) / len(self.copies)
        read = given.values if isinstance(given, Rounded) else given
        return {
            "epilogue": epilogue,
            "input": "rounded" if isinstance(given, Rounded) else None,
            **against(took, weight, read, x, epilogue, ceilings),
        }

    def _rounds(self, num: int, prologue: str | None) -> bool:
        return prologue in self.part.prologues and self.kernel.rounds(self.copies[0], num)

    def _reader_rounds(self, num: int) -> bool:
        """Whether the product behind `silu_mul` takes it rounded, by the same kernel."""
        if self.reader is None or "silu_mul" not in self.part.prologues:
            return False
        return bool(self.kernel.rounds(self.reader, num))

    def _rounded(self, x: Tensor) -> Tensor | Rounded:
        """As what makes the input would give it."""
        prologue, prepared = self.product.prologue, self.copies[0]
        if not self._rounds(len(x), prologue):
            return x
        if prologue == "silu_mul":
            return self.kernel.round_silu_mul(x, x, prepared)
        return self.kernel.round_norm(x, None, x.new_ones(x.shape[1]), 1e-6, prepared)[0]

    def _epilogue_at(self, num: int) -> str | None:
        match self.epilogue:
            case "add" if not self.kernel.adds(self.copies[0], num):
                return None
            case "silu_mul" if self._reader_rounds(num):
                return None
        return self.epilogue

    def _run(self, x: Tensor | Rounded, epilogue: str | None, residual: Tensor | None) -> None:
        for each in self.copies:
            match epilogue:
                case "silu_mul":
                    self.kernel.run_silu_mul(x, each, None)
                case "add":
                    self.kernel.run_add(x, each, None, residual)
                case _:
                    self.kernel.run(x, each, None)


def against(
    took: float,
    weight: Weight,
    given: Tensor,
    x: Tensor,
    epilogue: str | None,
    ceilings: Ceilings,
) -> dict[str, float]:
    """A time in seconds beside its floor: of input `given`, which is x [T, in] or x rounded."""
    num_bytes = bytes_of([weight]) + given.nbytes
    # The output; half of it behind silu_mul, and a residual of its size before add.
    sizes = {None: 1, "silu_mul": 0.5, "add": 2}
    num_bytes += int(x.shape[0] * weight.out_features * x.itemsize * sizes[epilogue])
    flops = 2 * x.shape[0] * weight.out_features * weight.in_features
    floor = max(num_bytes / ceilings.bandwidth, flops / ceilings.rate(weight.format))
    return {
        "us": took * 1e6,
        "tb_per_s": num_bytes / took / 1e12,
        "floor_us": floor * 1e6,
        "share": floor / took,
    }
