"""`rackmount explain`: what would be mounted and why, without weights and without a GPU."""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import torch
import typer

from rackmount.cli.options import AsJson, EngineOptions, Model, unfold
from rackmount.cli.progress import progress
from rackmount.config import DTYPES, EngineConfig
from rackmount.decisions import Decision, decisions, finding
from rackmount.execution.memory import free_bytes, num_kv_blocks, require_weights, size
from rackmount.loading.locate import locate, read_config
from rackmount.rack import Rack, draft_rack, dtype_name
from rackmount.report import capacity, full_requests, graphs, headline, kv_scales, unmet_names
from rackmount_registry.attention import FP8
from rackmount_registry.errors import ConfigError, SelectionError
from rackmount_registry.plain import as_plain
from rackmount_registry.plugins import PluginManager
from rackmount_registry.selection import Candidate, PairCandidate


@unfold
def explain(
    ctx: typer.Context,
    model: Model,
    memory_gib: Annotated[
        float | None,
        typer.Option(min=0, help="Memory for weights and KV, instead of what is free."),
    ] = None,
    as_json: AsJson = False,
    *,
    engine: EngineOptions,
) -> None:
    """Show what would be mounted for MODEL, what refuses the rest, and what memory would hold.

    MODEL may be a config.json, or a folder with nothing else. Ends with 2 where no part fits, and
    where memory that is there would not hold the weights and KV.
    """
    manager: PluginManager = ctx.obj
    config = EngineConfig.create(model=model, **engine.arguments())
    with progress() as report:
        path = locate(model, manager, report, weights=False)
    try:
        rack = draft_rack(config, read_config(path, manager), manager)
    except SelectionError as error:
        failure = {"error": str(error), "candidates": as_plain(error.candidates)}
        _print(as_json, failure, _weighed(error.candidates))
        raise
    made = [*finding(model, path, manager), *decisions(rack, manager)]
    memory = _memory(rack, memory_gib)
    figures = {"decisions": as_plain(made)} | _figures(rack, memory)
    _print(as_json, figures, _lines(rack, made, memory))
    short = memory is not None and figures["num_kv_blocks"] is None
    if short or any(decision.winner is None for decision in made):
        raise typer.Exit(2)


def _print(as_json: bool, plain: dict[str, Any], lines: Iterable[str]) -> None:
    for line in [json.dumps(plain, indent=2)] if as_json else lines:
        typer.echo(line)


def _lines(rack: Rack, made: list[Decision], memory: int | None) -> Iterator[str]:
    yield headline(rack)
    for decision in made:
        yield f"\n{decision}"
        yield from _weighed(decision.candidates)
    yield f"\nweights: {size(rack.draft.weight_bytes)} by the configuration; tensors are not read"
    by_dtype = _kv_bytes_per_token(rack)
    own = dtype_name(rack.kv_dtype)
    others = ", ".join(f"{size(by_dtype[name])} in {name}" for name in by_dtype if name != own)
    yield f"KV per token: {size(by_dtype[own])} in {own} ({others})"
    yield from unmet_names(rack)
    yield from kv_scales(rack)
    num_blocks, problem = _fitting_blocks(rack, memory)
    yield from [f"KV cache: {problem}"] if num_blocks is None else capacity(rack, num_blocks)
    yield graphs(rack)


def _weighed(candidates: Iterable[Any]) -> list[str]:
    """A line for each verdict; of a pair that its parts spoil, theirs."""
    verdicts = {True: "accepted", False: "refused "}
    judged = [part for candidate in candidates for part in _judged(candidate)]
    lines = (f"  {verdicts[it.accepted]}  {it}".removesuffix(": fits") for it in judged)
    return list(dict.fromkeys(lines))


def _judged(candidate: Candidate | PairCandidate) -> list[Candidate | PairCandidate]:
    if isinstance(candidate, Candidate) or candidate.accepted or candidate.reasons:
        return [candidate]
    return [part for part in (candidate.first, candidate.second) if not part.accepted]


def _figures(rack: Rack, memory: int | None) -> dict[str, Any]:
    num_blocks, problem = _fitting_blocks(rack, memory)
    return {
        "model": str(rack.config.model),
        "device": str(rack.device),
        "dtype": dtype_name(rack.dtype),
        "kv_dtype": dtype_name(rack.kv_dtype),
        "max_model_len": rack.max_model_len,
        "block_size": rack.block_size,
        "weight_bytes": rack.draft.weight_bytes,
        "unmet_names": rack.draft.unmet(),
        "kv_bytes_per_token": _kv_bytes_per_token(rack),
        "memory_bytes": memory,
        "num_kv_blocks": num_blocks,
        "num_kv_tokens": None if num_blocks is None else num_blocks * rack.block_size,
        "max_full_requests": None if num_blocks is None else full_requests(rack, num_blocks),
        "problem": problem,
        "eager_because": rack.eager_because,
        "decode_sizes": rack.decode_sizes,
        "mixed_sizes": rack.mixed_sizes,
    }


def _kv_bytes_per_token(rack: Rack) -> dict[str, int]:
    """By dtype of the cache."""
    names = [*(name for name in DTYPES if name != "auto"), dtype_name(FP8)]
    specs = {name: rack.draft.cache_specs(getattr(torch, name)) for name in names}
    return {name: sum(spec.bytes_per_token for spec in specs[name]) for name in names}


def _memory(rack: Rack, memory_gib: float | None) -> int | None:
    """What there is for weights and KV; None where the device is not here."""
    share = rack.config.gpu_memory_utilization if rack.device.type == "cuda" else 1.0
    if memory_gib is None:
        return free_bytes(rack.device, share)
    num_bytes = memory_gib * 2**30 * share
    if not math.isfinite(num_bytes):
        raise ConfigError(f"memory_gib={memory_gib} must be a size that a machine may have")
    return int(num_bytes)


def _fitting_blocks(rack: Rack, memory: int | None) -> tuple[int | None, str | None]:
    """Blocks that fit into `memory` beside the weights; or None, and why."""
    sharing = rack.num_ranks if rack.device.type == "cpu" else 1
    if memory is None:
        return None, f"{rack.device} is not here; --memory-gib says how much memory to count with"
    try:
        require_weights(rack, memory, sharing)
        return num_kv_blocks(rack, memory - rack.draft.weight_bytes * sharing), None
    except ConfigError as error:
        return None, str(error)
