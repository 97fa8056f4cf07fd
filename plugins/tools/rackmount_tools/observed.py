"""What a model's queries, keys, values and inputs of products are on given data.

The model runs as its architecture file reads, unfused and without an engine, whole sequences at a
time: what is seen of a layer is what it would have written to its cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rackmount import Rack
from rackmount_registry.attention import AttentionLayer, KeyMaps
from rackmount_registry.checkpoint import Checkpoint, Report
from rackmount_registry.mount import assemble, fill
from rackmount_registry.nn import Linear, MergedLinear
from rackmount_registry.step import ReferenceStep
from rackmount_tools.key_maps import Moments
from rackmount_tools.kv_scales import ScaleSearch

Look = Callable[[int, Tensor, Tensor], None]
"""Takes the index of a layer, its queries [T, H, D], and what it has cached: [2, T, G, D]."""


@dataclass(kw_only=True)
class Observed:
    """By the index of a layer, after head norms and rotary embedding; and by logical weight."""

    maps: dict[int, KeyMaps] = field(default_factory=dict)
    """Float64; where they were asked for, keys are seen mapped."""
    keys: dict[int, ScaleSearch] = field(default_factory=dict)
    values: dict[int, ScaleSearch] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Largest magnitude over all features: float32 []."""
    num_tokens: int = 0
    num_sequences: int = 0
    maps_left_out: bool = False
    """The model had maps of keys, and scales are those of keys without."""


def observe(
    rack: Rack,
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    report: Report,
    *,
    per_head: bool,
    inputs: bool,
    key_maps: bool = False,
) -> Observed:
    """Runs the sequences through the model; twice, where maps are to be found first.

    Args:
        per_head: whether each KV head has a scale of its own.
        inputs: whether those of linear layers are looked at as well.
        key_maps: whether keys are mapped.

    Raises:
        CheckpointError: as for `fill`.
    """
    seen = Observed(num_tokens=sum(map(len, sequences)), num_sequences=len(sequences))
    step = _ObservingStep(rack.device)
    mounted = assemble(
        rack.draft,
        rack.parts.load(rack.options),
        step,
        device=rack.device,
        max_positions=rack.max_model_len,
    )
    fill(mounted, checkpoint, report)
    if inputs:
        for socket in rack.draft.sockets:
            match socket:
                case Linear(gemm=gemm):
                    gemms = [gemm]
                case MergedLinear(gemms=gemms):
                    pass
                case _:
                    continue
            names = [name for gemm in gemms for name in gemm.weight.names]
            socket.register_forward_pre_hook(partial(_see_input, seen.inputs, names))

    def run(look: Look) -> None:
        step.look = look
        with torch.inference_mode():
            for done, ids in enumerate(sequences, 1):
                step.begin([len(ids)])
                rack.draft.model(torch.tensor(ids, device=rack.device))
                report("run", done, len(sequences))

    if key_maps:
        moments = {layer.index: Moments() for layer in rack.draft.attention}
        run(lambda index, q, cache: moments[index].see(q, cache[0]))
        for layer in rack.draft.attention:
            found = seen.maps[layer.index] = moments[layer.index].maps()
            layer.key_maps = KeyMaps(q=found.q.to(rack.dtype), k=found.k.to(rack.dtype))
    run(partial(_see_cached, seen, per_head))
    return seen


class _ObservingStep(ReferenceStep):
    """Looks at what each layer attends with, and writes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.look: Look

    def begin(self, lengths: Sequence[int]) -> None:
        super().begin(lengths)
        # As an engine has them.
        self.positions = self.positions.to(self.device, torch.int32)
        self.slots = self.slots.to(self.device, torch.int32)

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(_Watched(layer, self.look), q, k, v)


class _Watched:
    """An `AttentionLayer` whose cache is looked at once it is written."""

    def __init__(self, layer: AttentionLayer, look: Look) -> None:
        self.layer, self.look = layer, look
        self.index, self.params, self.kv_scales = layer.index, layer.params, layer.kv_scales

    def store(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        q = self.layer.store(q, k, v, cache, slots)
        self.look(self.index, q, cache)
        return q


def _see_cached(seen: Observed, per_head: bool, index: int, q: Tensor, cache: Tensor) -> None:
    for table, each in zip((seen.keys, seen.values), cache, strict=True):
        table.setdefault(index, ScaleSearch(per_head=per_head)).see(each)


def _see_input(
    inputs: dict[str, Tensor], names: Sequence[str], module: object, given: tuple[Any, ...]
) -> None:
    largest = given[0].abs().amax().float()
    for name in names:
        before = inputs.get(name)
        inputs[name] = largest if before is None else torch.maximum(before, largest)
