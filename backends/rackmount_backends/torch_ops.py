"""Op set "torch": the operations of `rackmount_registry.ops` in as few passes as plain torch takes.

Float32 and float64 are computed as they come. The narrow dtypes follow the definitions to the
letter, since where they round is part of the result.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_registry import ops
from rackmount_registry.attention import mapped, narrow

WIDE = (torch.float32, torch.float64)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    if x.dtype not in WIDE:
        return ops.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    return F.silu(gate).mul_(up) if gate.dtype in WIDE else ops.silu_mul(gate, up)


def rotary_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
    cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_map: Tensor | None = None,
    k_map: Tensor | None = None,
) -> Tensor:
    """See `ops.rotary_write`. All heads are turned at once."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    if table is not None:
        heads = _turn(torch.cat((q, k), 1), table.index_select(0, positions), interleaved)
        q, k = heads.split((q.shape[1], k.shape[1]), 1)
    if q_map is not None and k_map is not None:
        q, k = mapped(q, q_map), mapped(k, k_map)
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, k, v = slots[kept], k[kept], v[kept]
    if k_scale is None or v_scale is None:
        cache.index_copy_(1, slots.long(), torch.stack((k, v)).to(cache.dtype))
    else:
        both = torch.stack((narrow(k, k_scale), narrow(v, v_scale)))
        # `index_copy_` does not know FP8; copies of bytes are copies of numbers.
        cache.view(torch.uint8).index_copy_(1, slots.long(), both.view(torch.uint8))
    return q


def _turn(heads: Tensor, rows: Tensor, interleaved: bool) -> Tensor:
    """heads [T, N, D] by cosines and sines [T, 2, R / 2]."""
    cos, sin = rows.unsqueeze(2).unbind(1)
    width = 2 * rows.shape[-1]
    given = heads[..., :width]
    given = given if given.dtype in WIDE else given.float()
    turned = torch.empty_like(given, memory_format=torch.contiguous_format)
    (a, b), (to_a, to_b) = _pairs(given, interleaved), _pairs(turned, interleaved)
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin)
    out = turned.to(heads.dtype)
    return torch.cat((out, heads[..., width:]), -1) if width < heads.shape[-1] else out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """The features that are rotated against each other: two views [..., R / 2] of x [..., R]."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


TORCH_OPS = SimpleNamespace(
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    rotary_write=rotary_write,
    # Once a step each, or bound by their sort: the definitions are as fast as it gets.
    embedding=ops.embedding,
    gate=ops.gate,
    norm_gate=ops.norm_gate,
    build_batch=ops.build_batch,
    penalize=ops.penalize,
    sample=ops.sample,
    logprobs=ops.logprobs,
)
