"""Mixture of experts: routing as data, and what an expert kernel and a token dispatcher promise.

Shapes: T tokens, H hidden size, K experts per token, E experts of this rank, I expert width of this
rank.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rackmount_registry.axes import Cut, Group
from rackmount_registry.formats import Weight


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How router logits become experts and weights; the op `route` carries it out."""

    top_k: int
    scoring: Literal["softmax"] = "softmax"
    renormalize: bool = True
    """Divide the chosen weights by their sum."""


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
    """What a dispatcher hands to the kernel, in the layout that its descriptor declares."""

    x: Tensor
    """[T, H]."""
    expert_ids: Tensor
    """int64 [T, K], local; -1 where the expert is not on this rank."""
    weights: Tensor
    """[T, K], float32 or wider."""
    handle: Any = None
    """The dispatcher's own, for `combine`."""


class ExpertKernel(Protocol):
    """Runs `down(silu(gate x) * up x)` for each token's experts and sums by weight, in a fixed
    order."""

    def prepare(self, bundle: ExpertBundle) -> Any:
        """Repacks once, after loading."""

    def run(self, given: ExpertInput, prepared: Any) -> Tensor:
        """[T, H] in the dtype of x; zero rows for tokens without a local expert. T may be 0."""


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

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> ExpertInput:
        """x [T, H], global expert ids int64 [T, K], weights float32 [T, K]. T may be 0."""

    def combine(self, out: Tensor, given: ExpertInput) -> Tensor:
        """The kernel's output back in the order of the tokens: [T, H], complete or this rank's
        share of a sum.

        `reduces` says which."""

    reduces: bool
    """True: the result is complete. False: the mount adds a sum over `group`."""
