"""Capabilities as data: rows of a table, each row a conjunction.

A part declares a tuple of `Cell`s; a `Demand` states what the engine needs. A part fits when one
whole row fits. Flat sets could not say "FP8 KV only with head size 128 on sm_90". The same rows
feed selection, refusals, `explain` and the documentation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rackmount_registry.attention import AttentionParams

ExpertLayout = Literal["contiguous", "batched", "batched_fp8"]
"""How tokens lie between a token dispatcher and an expert kernel: "contiguous" is
`rackmount_registry.experts.ExpertInput`, the others are `BatchedExpertInput` with x in the tokens'
dtype, or in FP8 with scales."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one use of a part needs. None means "does not matter here" and refuses nothing."""

    device: str | None = None
    """Device type: "cpu" or "cuda"."""
    compute_capability: tuple[int, int] | None = None
    """(major, minor) of the GPU; None on a CPU."""
    dtype: str | None = None
    kv_dtype: str | None = None
    head_size: int | None = None
    block_size: int | None = None
    phase: str | None = None
    """"prefill" or "decode"."""
    weight_format: str | None = None
    layout: ExpertLayout | None = None
    """Layout of an expert kernel's input, as the token dispatcher yields it."""
    num_ranks: int | None = None
    features: frozenset[str] = frozenset()
    """Named extras that must all be there: "sliding_window", "soft_cap", "sinks", ..."""
    layers: "frozenset[AttentionParams]" = frozenset()
    """The distinct layers of attention, for a backend's `jit`: no cell looks at them. Empty where
    nobody said."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of a part's capability table. None leaves a column unconstrained."""

    devices: tuple[str, ...] | None = None
    compute_capability: tuple[int, int] | None = None
    """The least (major, minor) that the row needs, on CUDA devices."""
    compute_capability_below: tuple[int, int] | None = None
    """The first (major, minor) that it no longer serves."""
    dtypes: tuple[str, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None
    head_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    phases: tuple[str, ...] | None = None
    weight_formats: tuple[str, ...] | None = None
    layouts: tuple[ExpertLayout, ...] | None = None
    """Those of its input that an expert kernel takes."""
    max_ranks: int | None = None
    features: frozenset[str] = frozenset()
    """Extras that the row supports; a demand for any other is refused."""

    def refusals(self, demand: Demand) -> tuple[str, ...]:
        """Every reason why this row does not serve `demand`; empty when it does."""
        reasons = []
        for column, wanted in (
            ("devices", demand.device),
            ("dtypes", demand.dtype),
            ("kv_dtypes", demand.kv_dtype),
            ("head_sizes", demand.head_size),
            ("block_sizes", demand.block_size),
            ("phases", demand.phase),
            ("weight_formats", demand.weight_format),
            ("layouts", demand.layout),
        ):
            legal = getattr(self, column)
            if wanted is not None and legal is not None and wanted not in legal:
                listed = ", ".join(map(str, legal))
                reasons.append(f"{column.removesuffix('s')}={wanted} is not one of {listed}")
        least, has = self.compute_capability, demand.compute_capability
        if least is not None and has is not None and has < least:
            reasons.append(f"compute capability {has[0]}.{has[1]} is below {least[0]}.{least[1]}")
        end = self.compute_capability_below
        if end is not None and has is not None and has >= end:
            reasons.append(f"compute capability {has[0]}.{has[1]} is not below {end[0]}.{end[1]}")
        if None not in (self.max_ranks, demand.num_ranks) and demand.num_ranks > self.max_ranks:  # type: ignore[operator]  # both are ints here
            reasons.append(f"num_ranks={demand.num_ranks} is above {self.max_ranks}")
        reasons += [f"no {feature}" for feature in sorted(demand.features - self.features)]
        return tuple(reasons)
