"""Expert kernels at the shapes of a model, with tokens that are routed at random."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from rackmount import Rack
from rackmount_registry.descriptors import ExpertKernel, TokenDispatcher
from rackmount_registry.experts import ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight
from rackmount_registry.mount import random_weight
from rackmount_registry.nn import Experts
from rackmount_registry.options import instantiate
from rackmount_registry.plugins import PluginManager
from rackmount_tools.ceilings import Ceilings
from rackmount_tools.kernel_timing import bytes_of, num_rotated, seconds_of


def time_experts(
    rack: Rack, manager: PluginManager, ceilings: Ceilings, tokens: Sequence[int], names: list[str]
) -> list[dict[str, Any]]:
    """A row for each shape of a layer of experts, number of tokens, and kernel that fits, of
    `names` if there are any."""
    rows = []
    for layer, *others in layers_of(rack):
        bundle = bundle_of(layer, rack)
        for name in kernels_for(bundle, rack, manager, names):
            offer = manager.find(ExpertKernel, name)
            kernel, graph_safe = instantiate(offer, rack.options), offer.descriptor.graph_safe
            copies = [kernel.prepare(each) for each in copies_of(bundle, rack.device)]
            for num in tokens:
                row = {
                    "shape": _shape(layer, bundle),
                    "role": "experts",
                    "format": bundle.down.format,
                    "count": 1 + len(others),
                    "kernel": name,
                    "tokens": num,
                }
                inputs = inputs_of(layer, bundle, num, rack)
                calls = list(zip(inputs, cycle(copies), strict=False))
                took = seconds_of(partial(_run, kernel, calls), rack.device, graph_safe=graph_safe)
                rows.append(row | _against(took / len(calls), calls, layer, bundle, ceilings))
    return rows


def layers_of(rack: Rack) -> list[list[Experts]]:
    """Of the model, those of one shape together."""
    alike: dict[tuple[object, ...], list[Experts]] = {}
    for layer in rack.draft.sockets:
        if isinstance(layer, Experts):
            key = layer.hidden, layer.ffn, layer.experts, layer.routing.top_k, layer.gate_up.stored
            alike.setdefault(key, []).append(layer)
    return list(alike.values())


def bundle_of(layer: Experts, rack: Rack) -> ExpertBundle:
    """Random weights for it."""
    return ExpertBundle(
        gate_up=random_weight(layer.gate_up, device=rack.device, dtype=rack.dtype),
        down=random_weight(layer.down, device=rack.device, dtype=rack.dtype),
    )


def kernels_for(
    bundle: ExpertBundle, rack: Rack, manager: PluginManager, names: list[str]
) -> list[str]:
    """Those that fit and take the layout "contiguous", of `names` if there are any."""
    dispatchers = manager.offers(TokenDispatcher)
    layouts = {(it.distribution, it.name): it.descriptor.layout for it in dispatchers}
    fitting = {
        pair.first.name
        for pair in rack.parts.experts[bundle.down.format].candidates
        if pair.accepted and layouts[pair.second.distribution, pair.second.name] == "contiguous"
    }
    return sorted(fitting.intersection(names) if names else fitting)


def _shape(layer: Experts, bundle: ExpertBundle) -> str:
    up, down = bundle.gate_up, bundle.down
    both = " + ".join(f"{each.out_features} x {each.in_features}" for each in (up, down))
    return f"{layer.experts.count} x ({both})"


def copies_of(bundle: ExpertBundle, device: torch.device) -> list[ExpertBundle]:
    """Those that together outgrow the cache; most bundles do by themselves."""
    count = num_rotated(bytes_of([bundle.gate_up, bundle.down]), device, least=1)
    clones = (
        ExpertBundle(gate_up=_clone(bundle.gate_up), down=_clone(bundle.down))
        for _ in range(1, count)
    )
    return [bundle, *clones]


def _clone(weight: Weight) -> Weight:
    return replace(weight, tensors={name: each.clone() for name, each in weight.tensors.items()})


def inputs_of(layer: Experts, bundle: ExpertBundle, num: int, rack: Rack) -> list[ExpertInput]:
    """Of so many tokens, which choose other experts in each: as many as outgrow the cache."""
    count, top_k = layer.experts.count, layer.routing.top_k
    size = bytes_of([bundle.gate_up, bundle.down])
    expected = size * (1 - (1 - top_k / count) ** num)
    return [_routed(layer, num, rack) for _ in range(num_rotated(expected, rack.device, least=4))]


def _against(
    took: float,
    calls: Sequence[tuple[ExpertInput, Any]],
    layer: Experts,
    bundle: ExpertBundle,
    ceilings: Ceilings,
) -> dict[str, float]:
    """Seconds of a call beside its floor."""
    weights, first = (bundle.gate_up, bundle.down), calls[0][0]
    distinct = sum(len(given.expert_ids.unique()) for given, _ in calls) / len(calls)
    num_bytes = bytes_of(weights) * distinct / layer.experts.count + 2 * first.x.nbytes
    params = sum(each.out_features * each.in_features for each in weights)
    flops = 2 * first.expert_ids.numel() * params
    floor = max(num_bytes / ceilings.bandwidth, flops / ceilings.rate(bundle.down.format))
    return {
        "us": took * 1e6,
        "tb_per_s": num_bytes / took / 1e12,
        "floor_us": floor * 1e6,
        "share": floor / took,
        "distinct_experts": distinct,
    }


def _routed(layer: Experts, num: int, rack: Rack) -> ExpertInput:
    """Tokens and the experts that each chose."""
    count, top_k = layer.experts.count, layer.routing.top_k
    weights, ids = torch.rand(num, count, device=rack.device).topk(top_k)
    return ExpertInput(
        x=torch.randn(num, layer.hidden, device=rack.device).to(rack.dtype),
        expert_ids=ids.int(),
        weights=weights / weights.sum(-1, keepdim=True),
    )


def _run(kernel: Any, calls: list[tuple[ExpertInput, Any]]) -> None:
    for given, prepared in calls:
        kernel.run(given, prepared)
