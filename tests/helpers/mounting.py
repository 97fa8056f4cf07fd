"""A model on the reference step, mounted as an engine would, without an engine."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rackmount.loading.safetensors_reader import open_checkpoint
from rackmount_registry.attention import KVCache
from rackmount_registry.axes import Mesh
from rackmount_registry.capabilities import Demand
from rackmount_registry.checkpoint import Checkpoint
from rackmount_registry.config import ConfigReader
from rackmount_registry.descriptors import Architecture
from rackmount_registry.descriptors import QuantizationScheme as SchemeDescriptor
from rackmount_registry.formats import QuantizationScheme
from rackmount_registry.mount import Draft, Mounted, assemble, draft, fill, select_parts
from rackmount_registry.mount.parts import Parts
from rackmount_registry.plugins import PluginManager
from rackmount_registry.step import ReferenceStep

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A mounted and filled model with its step."""

    mounted: Mounted
    step: ReferenceStep
    bytes_read: int

    def hidden(self, *sequences: Tensor) -> Tensor:
        """ids [T_i] -> hidden states of all sequences, one after another."""
        self.step.begin([len(ids) for ids in sequences])
        with torch.inference_mode():
            return self.mounted.forward(torch.cat(sequences))

    def logits(self, *sequences: Tensor) -> Tensor:
        """ids [T_i] -> logits of all sequences, one after another: [sum of T_i, vocabulary]."""
        with torch.inference_mode():
            return self.mounted.logits(self.hidden(*sequences))


@cache
def plugins() -> PluginManager:
    """Everything that is installed."""
    return PluginManager.discover()


def draft_of(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
    scheme: QuantizationScheme | None = None,
    kv_cache: KVCache | None = None,
) -> Draft:
    """The draft of a checkpoint's architecture; `scheme` by default as its configuration says."""
    reader = ConfigReader(checkpoint.config)
    architecture = plugins().claimed(Architecture, reader.architectures[0])
    stored = reader.sub("quantization_config")
    if scheme is None and stored is not None:
        scheme = plugins().claimed(SchemeDescriptor, stored.quant_method).load()(stored)
    return draft(
        architecture.load(), reader, dtype=dtype, mesh=mesh, scheme=scheme, kv_cache=kv_cache
    )


def mount_reference(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
    scheme: QuantizationScheme | None = None,
    kv_cache: KVCache | None = None,
    parts: Parts | None = None,
    max_positions: int = 64,
) -> Reference:
    """Mounts `folder` with the parts that `auto` chooses, or with `parts`."""
    checkpoint = open_checkpoint(folder)
    try:
        drafted = draft_of(checkpoint, dtype=dtype, mesh=mesh, scheme=scheme, kv_cache=kv_cache)
        return mount_draft(drafted, checkpoint, parts=parts, max_positions=max_positions)
    finally:
        checkpoint.close()


def mount_draft(
    drafted: Draft,
    checkpoint: Checkpoint,
    *,
    parts: Parts | None = None,
    max_positions: int = 64,
) -> Reference:
    """Assembles and fills a draft."""
    step = ReferenceStep()
    mounted = assemble(
        drafted,
        parts or chosen_parts(drafted),
        step,
        device=CPU,
        max_positions=max_positions,
    )
    return Reference(mounted=mounted, step=step, bytes_read=fill(mounted, checkpoint))


def chosen_parts(drafted: Draft) -> Parts:
    """What `auto` chooses for a draft on the CPU."""
    demand = Demand(device="cpu", dtype=str(drafted.dtype).removeprefix("torch."))
    return select_parts(plugins(), drafted, demand).load()
