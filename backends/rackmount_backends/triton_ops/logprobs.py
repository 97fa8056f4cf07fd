"""`logprobs`: a survey of all logits by many programs, then one program a row.

The vocabulary is in parts of `PART` ids, `PARTS` of which are a program's. `survey_logprobs_kernel`
reads every logit once, and leaves of each program's the largest, the sum of exponentials above it
and how many are above the token's own; of each part, the token that comes first in the order.
`logprobs_kernel` sums up, and lists the most likely: of the parts' first tokens, the first of all
is the next, and the one behind it in its part takes its place. That reads one part for each token
listed, and neither writes nor sorts the vocabulary. Both are the same for a row whatever others
there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_backends.triton_ops.launch import block_of
from rackmount_backends.triton_ops.operation import Launch, Operation
from rackmount_backends.triton_ops.race import INF
from rackmount_registry.device.launch import launch_options

PART = 256
"""Ids of a part."""
PARTS = 16
"""Parts of a program."""
NONE = tl.constexpr(-(2**63))
"""Behind the places of all tokens."""


@triton.jit
def place_of(values, ids):
    """int64, the larger the earlier in the order: by the logit's bits, as `order.largest`, then by
    lowest id."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rising = tl.where(bits < 0, -magnitude, magnitude)
    return (rising.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def token_at(place):
    """The float32 logit, but 0 for -0, and the id of a place."""
    rising = (place >> 32).to(tl.int32)
    magnitude = tl.abs(rising).to(tl.float32, bitcast=True)
    return tl.where(rising < 0, -magnitude, magnitude), 0x7FFFFFFF - (place & 0x7FFFFFFF)


# A kernel for every number of tokens, or place in a prompt, would be compiled in a step.
@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["token_ids"])
def survey_logprobs_kernel(
    logits,
    token_ids,
    tops,
    totals,
    above,
    firsts,
    num,
    stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    NUM_PARTS: tl.constexpr = (V + PART - 1) // PART
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    parts = group * PARTS + tl.arange(0, PARTS)
    ids = parts[:, None] * PART + tl.arange(0, PART)[None, :]
    values = tl.load(logits + ids, mask=ids < V, other=-INF).to(tl.float32)
    own = tl.load(logits + tl.load(token_ids + row)).to(tl.float32)
    top = tl.max(tl.max(values, 1), 0)
    base = tl.where(top > -INF, top, 0.0)
    at = row * tl.num_programs(1) + group
    tl.store(tops + at, top)
    tl.store(totals + at, tl.sum(tl.sum(tl.exp(values - base), 1), 0))
    tl.store(above + at, tl.sum(tl.sum((values > own).to(tl.int32), 1), 0))
    if num > 0:
        places = tl.where(ids < V, place_of(values, ids), NONE)
        tl.store(firsts + row * NUM_PARTS + parts, tl.max(places, 1), mask=parts < NUM_PARTS)


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["token_ids"])
def logprobs_kernel(
    logits,
    token_ids,
    tops,
    totals,
    above,
    firsts,
    ids,
    logprobs,
    ranks,
    num,
    stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    NUM_PARTS: tl.constexpr = (V + PART - 1) // PART
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    ids += row * (num + 1)
    logprobs += row * (num + 1)
    groups = tl.arange(0, GROUPS_WIDTH)
    at, inside = row * GROUPS + groups, groups < GROUPS
    of_groups = tl.load(tops + at, mask=inside, other=-INF)
    top = tl.max(of_groups)
    sums = tl.load(totals + at, mask=inside, other=0.0) * tl.exp(of_groups - top)
    log_total = tl.log(tl.sum(sums).to(tl.float64)).to(tl.float32)
    token = tl.load(token_ids + row)
    tl.store(ids, token)
    tl.store(logprobs, tl.load(logits + token).to(tl.float32) - top - log_total)
    tl.store(ranks + row, tl.sum(tl.load(above + at, mask=inside, other=0)) + 1)
    columns = tl.arange(0, WIDTH)
    leaders = tl.load(firsts + row * NUM_PARTS + columns, mask=columns < NUM_PARTS, other=NONE)
    for index in range(1, num + 1):
        first = tl.max(leaders)
        value, token = token_at(first)
        tl.store(ids + index, token)
        tl.store(logprobs + index, value - top - log_total)
        part = (token // PART).to(tl.int32)
        of_part = part * PART + tl.arange(0, PART)
        values = tl.load(logits + of_part, mask=of_part < V, other=-INF).to(tl.float32)
        places = place_of(values, of_part)
        behind = tl.max(tl.where((of_part < V) & (places < first), places, NONE))
        leaders = tl.where(columns == part, behind, leaders)


def _logprobs(
    logits: Tensor, token_ids: Tensor, num: int
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Launch]]:
    num_rows, size = logits.shape
    assert logits.stride(1) == 1 and token_ids.is_contiguous() and 0 <= num <= size
    num_parts = triton.cdiv(size, PART)
    num_groups = triton.cdiv(num_parts, PARTS)

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows, columns), dtype=dtype, device=logits.device)

    shared = {
        "logits": logits,
        "token_ids": token_ids,
        "tops": empty(num_groups, torch.float32),
        "totals": empty(num_groups, torch.float32),
        "above": empty(num_groups, torch.int32),
        "firsts": empty(num_parts, torch.int64),
        "num": num,
        "stride": logits.stride(0),
        "V": size,
        "PART": PART,
        "num_warps": 4,
        **launch_options(logits.device),
    }
    ids, values = empty(1 + num, torch.int64), empty(1 + num, torch.float32)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    listing = {
        "ids": ids,
        "logprobs": values,
        "ranks": ranks,
        "GROUPS": num_groups,
        "GROUPS_WIDTH": block_of(num_groups),
        "WIDTH": block_of(num_parts),
    }
    return (ids, values, ranks), [
        (survey_logprobs_kernel, (num_rows, num_groups), shared | {"PARTS": PARTS}),
        (logprobs_kernel, (num_rows,), shared | listing),
    ]


logprobs = Operation(_logprobs)
"""See `ops.logprobs`. Each of the `num` most likely takes a row's program about as long as another:
thousands of them are slow."""
