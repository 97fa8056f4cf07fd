"""What a model's keys, values and inputs of products reach on given data.

The model runs as its architecture file reads, unfused and without an engine, whole sequences at a
time: what is seen of a layer is what it would have written to its cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rackmount import Rack
from rackmount_registry.attention import AttentionLayer
from rackmount_registry.checkpoint import Checkpoint, Report
from rackmount_registry.mount import assemble, fill
from rackmount_registry.nn import Linear, MergedLinear
from rackmount_registry.step import ReferenceStep


@dataclass(kw_only=True)
class Observed:
    """Largest magnitudes, float32."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    """Index of a layer -> [KV heads], after head norms and rotary embedding."""
    values: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Logical weight -> [], over all features."""


def observe(
    rack: Rack,
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    report: Report,
    *,
    inputs: bool,
) -> Observed:
    """Runs the sequences through the model.

    Args:
        inputs: whether those of linear layers are looked at as well.

    Raises:
        CheckpointError: as for `fill`.
    """
    seen = Observed()
    step = _ObservingStep(seen, rack.device)
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
    with torch.inference_mode():
        for done, ids in enumerate(sequences, 1):
            step.begin([len(ids)])
            rack.draft.model(torch.tensor(ids, device=rack.device))
            report("run", done, len(sequences))
    return seen


class _ObservingStep(ReferenceStep):
    """Looks at what each layer writes."""

    def __init__(self, seen: Observed, device: torch.device) -> None:
        super().__init__()
        self.seen, self.device = seen, device

    def begin(self, lengths: Sequence[int]) -> None:
        super().begin(lengths)
        # As an engine has them.
        self.positions = self.positions.to(self.device, torch.int32)
        self.slots = self.slots.to(self.device, torch.int32)

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(_Watched(layer, self.seen), q, k, v)


class _Watched:
    """An `AttentionLayer` whose cache is looked at once it is written."""

    def __init__(self, layer: AttentionLayer, seen: Observed) -> None:
        self.layer, self.seen = layer, seen
        self.index, self.params, self.kv_scales = layer.index, layer.params, layer.kv_scales

    def store(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        q = self.layer.store(q, k, v, cache, slots)
        largest = cache.abs().amax((1, 3)).float()
        _grow(self.seen.keys, self.index, largest[0])
        _grow(self.seen.values, self.index, largest[1])
        return q


def _see_input(
    inputs: dict[str, Tensor], names: Sequence[str], module: object, given: tuple[Any, ...]
) -> None:
    largest = given[0].abs().amax().float()
    for name in names:
        _grow(inputs, name, largest)


def _grow(table: dict[Any, Tensor], key: Any, largest: Tensor) -> None:
    before = table.get(key)
    table[key] = largest if before is None else torch.maximum(before, largest)
