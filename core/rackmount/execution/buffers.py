"""The step's tensors on the device, at addresses that CUDA graphs can rely on."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload, upload_into
from rackmount.execution.batch import FlatBatch, PersistentBatch
from rackmount.scheduling.plan import StepPlan
from rackmount_registry.errors import ConfigError

ARRAYS = tuple(field.name for field in fields(FlatBatch))
ALIGNMENT = 32
"""In int32: sections begin where wide loads may."""


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """A `FlatBatch` on the device: int32, of the same shapes. Read before the next is loaded."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    rows: Tensor
    logits_indices: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    block_table: Tensor
    """[R, max blocks]: filled by the op `build_batch`."""


class StepBuffers:
    """What steps are loaded into. Steps of equal T, R and S lie at equal addresses."""

    def __init__(self, batch: PersistentBatch, max_tokens: int, device: torch.device) -> None:
        self._device = device
        num_rows, max_blocks = batch.block_table.shape
        self.last_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """The token sampled last in each row."""
        on_host = torch.from_numpy(batch.block_table)
        self.block_tables = on_host.to(device)
        """The persistent batch's table: on a CPU the very same memory."""
        self._block_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        size = sum(map(_aligned, (max_tokens,) * 3 + (num_rows + 1,) * 6))
        try:
            self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        except RuntimeError as error:
            if device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
                raise
            raise ConfigError(
                f"a step of {max_tokens} tokens takes {4 * size} bytes for their numbers, which "
                "are not there; lower max_num_batched_tokens, or max_num_seqs if it is more"
            ) from error

    def grow(self, plan: StepPlan) -> None:
        """Takes over the blocks that the plan gives to rows."""
        if self._device.type == "cpu":
            return
        (growth,) = plan.grown
        if not growth.rows.size and not plan.admitted:
            return
        width = self.block_tables.shape[1]
        places = [growth.rows.astype(np.int64) * width + growth.columns]
        blocks = [growth.block_ids]
        for entry in plan.admitted:
            (block_ids,) = entry.block_ids
            places.append(entry.row * width + np.arange(block_ids.size))
            blocks.append(block_ids)
        both = np.stack((np.concatenate(places), np.concatenate(blocks)))
        if both.size:
            where, values = upload(both, self._device)
            self.block_tables.view(-1).index_copy_(0, where, values.int())

    def load(self, flat: FlatBatch) -> StepTensors:
        """The step on the device, as `send` brings it there."""
        views = {name: self._packed[place] for name, place in self.send(flat).items()}
        return StepTensors(**views, block_table=self._block_table[: flat.rows.size])

    def send(self, flat: FlatBatch) -> dict[str, slice]:
        """Brings the step to the device by one copy that is not waited for; gives the places of its
        arrays. All that a captured step needs, which knows them."""
        arrays = {name: getattr(flat, name) for name in ARRAYS}
        places, end = {}, 0
        for name, array in arrays.items():
            places[name] = slice(end, end + array.size)
            end += _aligned(array.size)
        packed = np.zeros(end, np.int32)
        for name, array in arrays.items():
            packed[places[name]] = array
        upload_into(self._packed[:end], packed)
        return places


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
