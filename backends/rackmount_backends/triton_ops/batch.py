"""`build_batch`: one kernel for the ids and the block table, which asks the host for nothing."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_backends.triton_ops.operation import Launch, Operation
from rackmount_registry.device.launch import launch_options

BLOCK = 1024
"""Ids, or blocks of a request, of a program."""


@triton.jit(do_not_specialize=["num_tokens", "num_copies"])
def build_batch_kernel(
    ids,
    rows,
    seq_lens,
    last_ids,
    block_tables,
    block_table,
    num_tokens,
    num_copies,
    tables_stride,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first `num_copies` programs copy a chunk of a request's blocks each, the others look up
    a chunk of the ids."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    if program < num_copies:
        CHUNKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
        request = (program // CHUNKS).to(tl.int64)
        columns = program % CHUNKS * BLOCK + tl.arange(0, BLOCK)
        num_blocks = tl.cdiv(tl.load(seq_lens + request), BLOCK_SIZE)
        held = (columns < num_blocks) & (columns < WIDTH)
        source = tl.load(rows + request).to(tl.int64) * tables_stride + columns
        blocks = tl.load(block_tables + source, mask=held)
        tl.store(block_table + request * table_stride + columns, blocks, mask=held)
    else:
        tokens = (program - num_copies) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        given = tl.load(ids + tokens, mask=inside, other=0)
        awaited = given < 0
        sampled = tl.load(last_ids + (-1 - given), mask=awaited)
        tl.store(ids + tokens, sampled, mask=awaited)


def _build_batch(
    ids: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    last_ids: Tensor,
    block_tables: Tensor,
    block_table: Tensor,
    block_size: int,
) -> tuple[None, list[Launch]]:
    assert all(t.is_contiguous() for t in (ids, rows, seq_lens, last_ids))
    assert block_tables.stride(1) == block_table.stride(1) == 1
    width = min(block_tables.shape[1], block_table.shape[1])
    num_copies = len(rows) * triton.cdiv(width, BLOCK)
    given = {
        "ids": ids,
        "rows": rows,
        "seq_lens": seq_lens,
        "last_ids": last_ids,
        "block_tables": block_tables,
        "block_table": block_table,
        "num_tokens": len(ids),
        "num_copies": num_copies,
        "tables_stride": block_tables.stride(0),
        "table_stride": block_table.stride(0),
        "WIDTH": width,
        "BLOCK_SIZE": block_size,
        "BLOCK": BLOCK,
        "num_warps": 4,
        **launch_options(ids.device),
    }
    return None, [(build_batch_kernel, (num_copies + triton.cdiv(len(ids), BLOCK),), given)]


build_batch = Operation(_build_batch)
"""See `ops.build_batch`."""
