"""Mixture of experts: routing as data, and what an expert kernel, a token dispatcher and an expert
balancer promise.

Shapes: T tokens, H hidden size, K experts per token, E experts of this rank, I expert width of this
rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from rackmount_registry.axes import Cut, Group
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import Weight

ROUTER_ARRIVALS = 64
"""Counters of a `RouterState`."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How router logits become experts and weights; the op `gate` carries it out.

    Qwen3-MoE, Mixtral: softmax, renormalized or not. DeepSeek V2 (arXiv 2405.04434): softmax, not
    renormalized, scaled, "group_limited_greedy" with groups by their maximum. DeepSeek V3 (arXiv
    2412.19437): sigmoid, groups by the sum of their top 2, renormalized, scaled ("noaux_tc").
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    """Divide the chosen weights by their sum."""
    num_groups: int = 1
    """Equal parts of the experts, in order."""
    top_groups: int = 1
    """Groups that a token's experts come from."""
    group_score: Literal["max", "top2_sum"] = "max"
    """What chooses groups: the largest choice score in them, or the sum of the two largest."""
    scaling: float = 1.0
    """Factor of the weights, after any renormalization."""
    float32_logits: bool = False
    """Logits come of a product in float32 (DeepSeek) and are not rounded to the tokens' dtype."""

    def check(self, num_experts: int) -> None:
        """Raises ConfigError where so many experts cannot be routed to in this way."""
        if num_experts % self.num_groups:
            raise ConfigError(f"num_groups={self.num_groups} must divide {num_experts} experts")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(
                f"top_groups={self.top_groups} must be 1 to num_groups={self.num_groups}"
            )
        size = num_experts // self.num_groups
        if not 1 <= self.top_k <= size * self.top_groups:
            raise ConfigError(
                f"top_k={self.top_k} must be 1 to {size * self.top_groups}, the number of experts "
                "that a token may choose from"
            )
        if self.group_score == "top2_sum" and size < 2:
            raise ConfigError(f"group_score='top2_sum' needs groups of 2 experts, not of {size}")


@dataclass(frozen=True, kw_only=True)
class RouterState:
    """What a layer's router keeps on the device from step to step, at fixed addresses."""

    load: Tensor
    """int64 [experts of all ranks]: tokens that chose each of them so far, padding left out."""
    arrivals: Tensor
    """int32 [ROUTER_ARRIVALS]: zeros between calls, for kernels whose programs meet at counters."""

    @classmethod
    def fresh(cls, num_experts: int, device: torch.device) -> Self:
        return cls(
            load=torch.zeros(num_experts, dtype=torch.int64, device=device),
            arrivals=torch.zeros(ROUTER_ARRIVALS, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class ExpertBundle:
    """All expert weights of a layer on this rank: nothing per expert lives outside, so that experts
    can be moved."""

    gate_up: Weight
    """[E, 2 I, H]: parts (I, I), gate first."""
    down: Weight
    """[E, H, I]."""


@dataclass(frozen=True, kw_only=True)
class ExpertInput:
    """What a dispatcher hands to the kernel in the layout "contiguous": tokens one after another,
    each with its experts. The kernel applies the weights and sums over K."""

    x: Tensor
    """[T, H]."""
    expert_ids: Tensor
    """int32 [T, K], local, all different; -1 where the expert is not on this rank, or the token is
    padding: these take no part and cost no weight reads."""
    weights: Tensor
    """float32 [T, K]; float64 where the tokens are. Of any value where the id is -1."""
    handle: Any = None
    """The dispatcher's own, for `combine`."""


@dataclass(frozen=True, kw_only=True)
class BatchedExpertInput:
    """What a dispatcher hands to the kernel in the layouts "batched" and "batched_fp8": for every
    expert a box of C rows, of which tokens take the first. A row is computed by itself: the
    dispatcher applies the weights and sums over K, in `combine`."""

    x: Tensor
    """[E, C, H], contiguous: of `dtype` in "batched", float8_e4m3fn in "batched_fp8"."""
    num_valid: Tensor
    """int32 [E], on the device, 0 to C: rows of each box that tokens take. Those behind them are of
    any value, NaN too, and take no part; an expert without any costs no weight reads."""
    dtype: torch.dtype
    """Of the tokens, and of the kernel's results."""
    scales: Tensor | None = None
    """float32 [E, C, H / 128, rounded up], factors of 128 columns of x each, in any strides. Of
    "batched_fp8" alone."""
    handle: Any = None
    """The dispatcher's own, for `combine`."""


@dataclass(frozen=True, kw_only=True)
class ExpertUse:
    """How a layer will be called."""

    top_k: int
    """K."""
    dtype: torch.dtype
    """Of the tokens."""


class ExpertKernel(Protocol):
    """Runs `down(silu(gate x) * up x)` for each token's experts, and in the layout "contiguous"
    sums by weight, in a fixed order. The layers of a model that share a weight format share a
    kernel.

    Its descriptor's cells say which layouts and weight formats it takes, and `graph_safe` whether
    `run` may be captured.
    """

    def prepare(self, bundle: ExpertBundle, use: ExpertUse | None = None) -> Any:
        """Repacks once, after loading; what it returns is handed to every `run`.

        What must be compiled for `use` may be compiled from here on. The mount leaves `use` out
        where a kernel's `prepare` does not name it.
        """

    def run(self, given: Any, prepared: Any) -> Tensor:
        """Results for `given`, of the type of a layout that the kernel takes.

        For an `ExpertInput` [T, H] in the dtype of x; zero rows for tokens without a local expert.
        T may be 0. For a `BatchedExpertInput` contiguous [E, C, H] of its `dtype`; rows from
        `num_valid` on are of any value. C may be 0, and all of `num_valid`.
        """


@runtime_checkable
class TunableExperts(ExpertKernel, Protocol):
    """A kernel that goes by measured tables, of which its option `tuned` names one's own."""

    def tune(
        self,
        bundles: Sequence[ExpertBundle],
        inputs: Mapping[int, Sequence[ExpertInput]],
        file: Path,
        *,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """Searches on this GPU, for about so long beside compiling, for what is fastest, and adds
        it to the table in `file`; tells how it goes.

        Args:
            bundles: layers of one shape, which together outgrow the L2 cache.
            inputs: number of tokens -> inputs of so many, each with experts of its own choice, in
                the layout "contiguous".

        Raises:
            ConfigError: a number of tokens for which a table has no place; a file that holds
                something else, was measured on another GPU or with other versions, or cannot be
                written.
        """


@dataclass(frozen=True, kw_only=True)
class DispatchContext:
    """What a token dispatcher is built from."""

    num_experts: int
    """Of the layer, over all ranks."""
    local_experts: Cut
    group: Group
    """Ranks that split the experts."""
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    """Of the tokens."""
    device: torch.device


class TokenDispatcher(Protocol):
    """Brings tokens to the ranks of their experts and their results back."""

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor
    ) -> ExpertInput | BatchedExpertInput:
        """What the kernel gets, of the type of the layout that the descriptor names.

        x [T, H], global expert ids int32 [T, K] with -1 for padding, weights float32 [T, K], of any
        value where the id is -1. T may be 0.
        """

    def combine(self, out: Tensor, given: Any) -> Tensor:
        """The kernel's output for `given`, which `dispatch` made, back in the order of the tokens:
        [T, H], complete or this rank's share of a sum.

        `reduces` says which. A batched output is summed here by the routing's weights, and of its
        rows only those that tokens took are read. Tokens without an expert get zeros."""

    reduces: bool
    """True: the result is complete. False: the mount adds a sum over `group`."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the experts of L layers live: S slots each, a rank after another, with E logical
    experts, each in one slot or more."""

    experts: Tensor
    """int64 [L, S]: the expert in each slot."""
    slots: Tensor
    """int64 [L, E, X]: the slots of each expert, X of them at most, -1 behind the last."""
    counts: Tensor
    """int64 [L, E]: how many slots each expert has."""


class ExpertBalancer(Protocol):
    """Decides where experts live, by what they had to do. A pure function of its arguments."""

    def place(
        self,
        load: Tensor,
        *,
        num_slots: int,
        num_ranks: int,
        num_nodes: int,
        num_groups: int,
        current: Placement | None,
    ) -> Placement:
        """A placement whose busiest rank has little more to do than the mean.

        Args:
            load: tokens of each expert, [L, E], of any window of time.
            num_slots: of all ranks together, a multiple of `num_ranks` and at least E.
            num_nodes: hosts that the ranks are on, equally many on each.
            num_groups: of experts that a router chooses as one; see `Routing.num_groups`.
            current: where they are now; a balancer may spare moves.
        """
