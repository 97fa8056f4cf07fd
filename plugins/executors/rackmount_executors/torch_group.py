"""Ranks joined by torch.distributed: gloo between CPUs, NCCL between GPUs."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rackmount_registry.axes import Solo
from rackmount_registry.executor import Seat

PATIENCE = timedelta(days=365)
"""Of a collective. Whoever waits for a rank that is gone is ended from outside, and a rank may wait
for its next request as long as nobody asks."""


class TorchGroup:
    """A `rackmount_registry.axes.Group` over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        # Both backends add each element on one rank and hand the sum out: equal bits everywhere.
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, -1)


def take_seat(rank: int, num_ranks: int, *, device: str, local_rank: int, store: Any) -> Seat:
    """Meets all ranks and builds the mesh, once in a process.

    Args:
        device: "cpu" or "cuda", the same on all ranks; or "cuda:N" for a single one.
        local_rank: this rank's place on its host, and which GPU is its own.
        store: a `torch.distributed.Store` where ranks meet; None finds it by the environment, as a
            launcher sets it.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        device = f"cuda:{local_rank}" if device == "cuda" else device
        torch.cuda.set_device(device)
    if num_ranks == 1:
        return Seat(rank=0, num_ranks=1, device=device, group=Solo())
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=PATIENCE,
    )
    mesh = init_device_mesh(kind, (num_ranks,), mesh_dim_names=("tp",))
    return Seat(
        rank=rank, num_ranks=num_ranks, device=device, group=TorchGroup(mesh.get_group("tp"))
    )


def leave() -> None:
    """Gives up the groups of `take_seat`."""
    if dist.is_initialized():
        dist.destroy_process_group()
