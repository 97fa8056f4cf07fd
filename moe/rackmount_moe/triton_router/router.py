"""`gate`: logits and choice in one launch where tokens are few, in two elsewhere; `norm_gate`: with
the norm before them, in one.

The launch for few tokens has programs over blocks of experts and parts of the hidden size, so that
many read the router's weight, and read it before they wait for what came before. Their sums go
through memory; of each block of tokens, the program that comes last adds them, always in the same
order, and chooses. Of a norm each program needs the sum of squares of whole rows, and makes it for
itself.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

from rackmount_moe.triton_router.choice import choose, columns_of_experts
from rackmount_registry.device.ahead import AheadCompiler, traits
from rackmount_registry.device.launch import launch_options
from rackmount_registry.experts import ROUTER_ARRIVALS, RouterState, Routing
from rackmount_registry.ops import NORM_GATE_TOKENS

FEW_TOKENS = 256
"""Up to so many, logits and choice are one launch."""
ROUTE_TOKENS = 8
"""Tokens of a program that only chooses."""
ROW_PROGRAMS = 64
"""One token's logits are made by at least so many programs, as long as each has MIN_COLUMNS."""
MIN_COLUMNS = 512
MAX_SPLITS = 8
"""Parts of the hidden size, where tokens are several."""
WIDE_TOKENS = 128
"""Above it a program has WIDE_EXPERTS experts: fewer read the same tokens, and there are enough."""
WIDE_EXPERTS = 64
WIDE_BYTES = 48 << 10
"""Of a tile of so many rows, with its tokens, at most: both lie in shared memory."""
DISTINCT_TOKENS = (1, 8, 16, WIDE_TOKENS + 1, FEW_TOKENS + 1)
"""Numbers of tokens for which kernels differ."""


@triton.jit(do_not_specialize=["num_tokens"])
def gate_kernel(
    x,
    norm_weight,
    normed,
    eps,
    weight,
    bias,
    slots,
    load,
    arrivals,
    partials,
    ids,
    weights,
    num_tokens,
    x_stride,
    H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROUND: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (e, h, t): logits of a block of experts, over a part of the hidden size, of a block
    of tokens. `partials` float32 [parts, num_tokens, E]; `arrivals` int32 [blocks of tokens] are
    zeros before and after. ROUND: logits are rounded to the dtype of x. With `norm_weight` [H] the
    logits are those of the norm of x, and `normed` [num_tokens, H] gets it; else both are None."""
    SPLITS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    PROGRAMS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E * SPLITS
    split, block = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    columns = split * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (rows < E)[:, None] & (columns < H)[None, :]
    w = tl.load(weight + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
    if norm_weight is not None:
        scales = tl.load(norm_weight + columns, mask=columns < H, other=0.0)
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = (tokens < num_tokens)[:, None] & (columns < H)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    given = tl.load(x + tokens[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
    if norm_weight is not None:
        if SPLITS == 1:
            squares = _squares(given)
        else:
            squares = tl.zeros([BLOCK_T], tl.float32)
            for part in tl.static_range(SPLITS):
                every = part * BLOCK_H + tl.arange(0, BLOCK_H)
                inside = (tokens < num_tokens)[:, None] & (every < H)[None, :]
                at = x + tokens[:, None] * x_stride + every[None, :]
                squares += _squares(tl.load(at, mask=inside, other=0.0))
        scaled = given.to(tl.float32) * tl.rsqrt(squares / H + eps)[:, None]
        scaled = scaled.to(given.dtype).to(tl.float32) * scales.to(tl.float32)[None, :]
        given = scaled.to(given.dtype)
        if tl.program_id(0) == 0:
            tl.store(normed + tokens[:, None] * H + columns[None, :], given, mask=mask)
    if BLOCK_T == 1:
        logits = tl.sum(w.to(tl.float32) * given.to(tl.float32), 1)[:, None]
    else:
        logits = tl.dot(w, given.T, input_precision="ieee")
    at = partials + (split * num_tokens + tokens)[None, :] * E + rows[:, None]
    tl.store(at, logits, mask=(rows < E)[:, None] & (tokens < num_tokens)[None, :])
    tl.debug_barrier()  # all threads' sums are there before one of them tells
    if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(arrivals + block, 0)
        experts = columns_of_experts(E, GROUPS, C, W, BLOCK_T)
        there = (tokens < num_tokens)[:, None] & (experts < E)[None, :]
        total = tl.zeros([BLOCK_T, C], tl.float32)
        for part in tl.static_range(SPLITS):
            sums = partials + (part * num_tokens + tokens)[:, None] * E + experts[None, :]
            total += tl.load(sums, mask=there, other=0.0, cache_modifier=".cg")
        if ROUND:
            total = total.to(x.dtype.element_ty).to(tl.float32)
        choose(
            total, experts, tokens, num_tokens, bias, slots, load, ids, weights, BLOCK_T, E, K, C,
            W, GROUPS, TOP_GROUPS, TOP2, SIGMOID, RENORMALIZE, SCALING,
        )  # fmt: skip


@triton.jit
def _squares(x):
    """Their sums along rows, float32."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits,
    bias,
    slots,
    load,
    ids,
    weights,
    num_tokens,
    BLOCK_T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of tokens from their logits [num_tokens, E] on."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = columns_of_experts(E, GROUPS, C, W, BLOCK_T)
    mask = (tokens < num_tokens)[:, None] & (experts < E)[None, :]
    at = logits + tokens[:, None].to(tl.int64) * E + experts[None, :]
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    choose(
        values, experts, tokens, num_tokens, bias, slots, load, ids, weights, BLOCK_T, E, K, C, W,
        GROUPS, TOP_GROUPS, TOP2, SIGMOID, RENORMALIZE, SCALING,
    )  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """Blocks of `gate_kernel`."""

    block_t: int
    block_e: int
    block_h: int
    num_warps: int


def tile(num_tokens: int, num_experts: int, hidden: int, itemsize: int) -> Tiling:
    """`itemsize` bytes a number of the weight. One token: a row of the weight for each program, in
    one warp if it is short. Several: a tile of 16 rows for tensor cores, or of more."""
    if num_tokens == 1:
        block_h = triton.next_power_of_2(hidden)
        while num_experts * triton.cdiv(hidden, block_h) < ROW_PROGRAMS and block_h > MIN_COLUMNS:
            block_h //= 2
        return Tiling(1, 1, block_h, num_warps=min(8, max(1, block_h // 2048)))
    block_h = max(64, triton.next_power_of_2(triton.cdiv(hidden, MAX_SPLITS)))
    block_t = 8 if num_tokens <= 8 else 16
    wide = num_tokens > WIDE_TOKENS and num_experts >= WIDE_EXPERTS
    wide = wide and (WIDE_EXPERTS + block_t) * block_h * itemsize <= WIDE_BYTES
    return Tiling(block_t, WIDE_EXPERTS if wide else 16, block_h, num_warps=4)


class Gate:
    """The op `gate`; see `ops.gate`. What `prepare` was told of is compiled in threads."""

    def __init__(self) -> None:
        self._ahead = AheadCompiler()

    def prepare(
        self,
        weight: Tensor,
        routing: Routing,
        bias: Tensor | None,
        slots: Tensor,
        state: RouterState,
    ) -> None:
        """Begins to compile all that calls with these launch, at any number of tokens."""
        for num_tokens in DISTINCT_TOKENS:
            x = weight.new_empty((num_tokens, weight.shape[1]))
            kernel, _, arguments = _launch(x, weight, routing, bias, slots, state)
            self._ahead.start(kernel, traits(kernel, arguments), arguments)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        routing: Routing,
        bias: Tensor | None,
        slots: Tensor,
        state: RouterState,
    ) -> tuple[Tensor, Tensor]:
        assert x.stride(1) == 1 and x.dtype == weight.dtype and weight.is_contiguous()
        if not len(x):
            return _outputs(x, routing)
        self._ahead.wait()
        kernel, grid, arguments = _launch(x, weight, routing, bias, slots, state)
        kernel[grid](**arguments)
        return arguments["ids"], arguments["weights"]


class NormGate:
    """The op `norm_gate`; see `ops.norm_gate`, and `Gate`."""

    def __init__(self) -> None:
        self._ahead = AheadCompiler()

    def prepare(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        routing: Routing,
        bias: Tensor | None,
        slots: Tensor,
        state: RouterState,
    ) -> None:
        """As of `Gate`; of x [1, H]."""
        for num_tokens in DISTINCT_TOKENS:
            if num_tokens <= NORM_GATE_TOKENS:
                some = x.new_empty((num_tokens, x.shape[1]))
                norm = norm_weight, eps
                kernel, _, arguments = _launch(some, weight, routing, bias, slots, state, norm)
                self._ahead.start(kernel, traits(kernel, arguments), arguments)

    def __call__(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        routing: Routing,
        bias: Tensor | None,
        slots: Tensor,
        state: RouterState,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert x.stride(1) == 1 and x.dtype == weight.dtype == norm_weight.dtype
        assert weight.is_contiguous() and len(x) <= NORM_GATE_TOKENS
        if not len(x):
            return torch.empty_like(x), *_outputs(x, routing)
        self._ahead.wait()
        norm = norm_weight, eps
        kernel, grid, arguments = _launch(x, weight, routing, bias, slots, state, norm)
        kernel[grid](**arguments)
        return arguments["normed"], arguments["ids"], arguments["weights"]


gate = Gate()
norm_gate = NormGate()


def _outputs(x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    ids = torch.empty((len(x), routing.top_k), dtype=torch.int32, device=x.device)
    return ids, torch.empty_like(ids, dtype=torch.float32)


def _launch(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    bias: Tensor | None,
    slots: Tensor,
    state: RouterState,
    norm: tuple[Tensor, float] | None = None,
) -> tuple[JITFunction, tuple[int, ...], dict[str, Any]]:
    """Kernel, grid and arguments for x [T, H], T > 0, of whose `norm`, weight and eps, logits may
    be. Many tokens' logits are made here."""
    num_tokens, (num_experts, hidden) = len(x), weight.shape
    ids, weights = _outputs(x, routing)
    shared = {
        "bias": bias,
        "slots": slots,
        "load": state.load,
        "ids": ids,
        "weights": weights,
        "num_tokens": num_tokens,
        **_options(routing, num_experts),
        **launch_options(x.device),
    }
    if num_tokens > FEW_TOKENS:
        if routing.float32_logits:
            x, weight = x.float(), weight.float()
        grid = (triton.cdiv(num_tokens, ROUTE_TOKENS),)
        many = {"logits": F.linear(x, weight), "BLOCK_T": ROUTE_TOKENS, "num_warps": 4}
        return route_kernel, grid, shared | many
    blocks = tile(num_tokens, num_experts, hidden, weight.element_size())
    splits = triton.cdiv(hidden, blocks.block_h)
    tokens = triton.cdiv(num_tokens, blocks.block_t)
    assert tokens <= ROUTER_ARRIVALS
    sums = (splits, num_tokens, num_experts)
    norm_weight, eps = norm or (None, 0.0)
    few = {
        "x": x,
        "norm_weight": norm_weight,
        "normed": None if norm is None else x.new_empty(x.shape),
        "eps": eps,
        "weight": weight,
        "arrivals": state.arrivals,
        "partials": torch.empty(sums, dtype=torch.float32, device=x.device),
        "x_stride": x.stride(0),
        "H": hidden,
        "BLOCK_T": blocks.block_t,
        "BLOCK_E": blocks.block_e,
        "BLOCK_H": blocks.block_h,
        "ROUND": not routing.float32_logits,
        "num_warps": blocks.num_warps,
    }
    return gate_kernel, (triton.cdiv(num_experts, blocks.block_e), splits, tokens), shared | few


def _options(routing: Routing, num_experts: int) -> dict[str, Any]:
    """What `choose` is compiled for."""
    width = triton.next_power_of_2(num_experts // routing.num_groups)
    return {
        "E": num_experts,
        "K": routing.top_k,
        "C": triton.next_power_of_2(routing.num_groups) * width,
        "W": width,
        "GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.top_groups,
        "TOP2": routing.group_score == "top2_sum",
        "SIGMOID": routing.scoring == "sigmoid",
        "RENORMALIZE": routing.renormalize,
        "SCALING": routing.scaling,
    }


TRITON_ROUTER = SimpleNamespace(gate=gate, norm_gate=norm_gate)
