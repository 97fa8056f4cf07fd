"""The page table of a step as FlashInfer takes it: all pages in a row."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rackmount_registry.attention import AttentionBatch


@dataclass(frozen=True, kw_only=True)
class Pages:
    """int32 on the host, pinned where there is a GPU, so that copies wait for nothing. Request r
    has the pages `indices[indptr[r] : indptr[r + 1]]`."""

    indptr: Tensor
    """[R + 1]."""
    indices: Tensor
    """[indptr[R]]."""
    last_lens: Tensor
    """[R]: tokens in each request's last page."""


def list_pages(batch: AttentionBatch, block_size: int) -> Pages:
    """The pages of a batch, of which `seq_lens` are at least 1."""
    counts = -(-batch.seq_lens // block_size)
    indptr, last_lens = host_tensor(len(counts) + 1), host_tensor(len(counts))
    ends = indptr.numpy()
    ends[0] = 0
    np.cumsum(counts, out=ends[1:])
    last_lens.numpy()[:] = (batch.seq_lens - 1) % block_size + 1
    indices = host_tensor(int(ends[-1]))
    # A page's place in the flat table: its row's first, and its number among the row's pages.
    first = batch.rows.astype(np.int64) * batch.block_table.shape[1]
    places = np.arange(len(indices)) + np.repeat(first - ends[:-1], counts)
    # "clip" writes straight into the pinned memory; "raise" would go through a copy.
    np.take(batch.block_table.reshape(-1), places, out=indices.numpy(), mode="clip")
    return Pages(indptr=indptr, indices=indices, last_lens=last_lens)


def host_tensor(size: int) -> Tensor:
    """Uninitialized int32, pinned where there is a GPU. PyTorch reuses its memory only when the
    copies from it are done."""
    return torch.empty(size, dtype=torch.int32, pin_memory=torch.cuda.is_available())
