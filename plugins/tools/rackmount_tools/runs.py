"""Runs of an engine that may be timed: all answers are whole, and nothing was thrown out on the
way."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rackmount import Engine, EngineOptions, RequestOutput, SamplingParams
from rackmount_registry.errors import ConfigError, RackmountError
from rackmount_registry.plugins import PluginManager
from rackmount_tools.ceilings import measure_ceilings
from rackmount_tools.costs import costs_of
from rackmount_tools.floors import Floors
from rackmount_tools.loads import Prompts
from rackmount_tools.shapes import resolved


def open_engine(
    model: str,
    arguments: dict[str, Any],
    manager: PluginManager,
    *,
    longest: int,
    because: Mapping[str, object],
) -> Engine:
    """An engine for a model or a shape, for requests of so many tokens with their output.

    Args:
        longest: `max_model_len`, where the arguments have none.
        because: the options that it comes from, for the text of an error.

    Raises:
        ConfigError: so many tokens are above what the model knows or the arguments allow.
    """
    options = ", ".join(f"{name}={value!r}" for name, value in because.items())
    asked = f"{options}: requests have up to {longest} tokens, and"
    length = arguments["max_model_len"]
    if length is None:
        length = longest
    elif length < longest:
        raise ConfigError(f"{asked} max_model_len={length} is below that")
    try:
        with resolved(model, arguments | {"max_model_len": length}) as (name, given):
            return Engine(name, manager=manager, **given)
    except ConfigError as error:
        if f"max_model_len={longest}" not in str(error):
            raise
        raise ConfigError(f"{asked} {error}") from error


def seats(engine: EngineOptions, needed: int, because: str) -> int:
    """`max_num_seqs` for so many requests at once: more than the default where it takes more.

    Raises:
        ConfigError: fewer were asked for.
    """
    default = EngineOptions.max_num_seqs
    if engine.max_num_seqs < needed and engine.max_num_seqs != default:
        raise ConfigError(
            f"max_num_seqs={engine.max_num_seqs} is below the {needed} requests at once of "
            f"{because}; choose at least that, or leave it out"
        )
    return max(engine.max_num_seqs, needed)


def measured_floors(engine: Engine) -> Floors:
    """Of its model, with the ceilings of its device as they are now."""
    rack = engine.rack
    formats = frozenset[str]().union(*rack.draft.formats().values())
    ceilings = measure_ceilings(rack.device, rack.dtype, formats)
    return Floors(costs_of(rack.draft), ceilings)


def greedy(max_tokens: int) -> SamplingParams:
    """The most likely tokens, so many of them."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def require_room(engine: Engine, lengths: Sequence[int]) -> None:
    """ConfigError where requests of these lengths do not fit into the KV pool together."""
    size = engine.rack.block_size
    needed = sum(-(-length // size) for length in lengths)
    if needed > engine.core.num_kv_blocks:
        fixed = engine.rack.config.num_kv_blocks is not None
        raise ConfigError(
            f"{len(lengths)} requests of up to {max(lengths)} tokens need {needed} KV blocks of "
            f"{size}, and the pool has {engine.core.num_kv_blocks}; choose fewer or shorter ones, "
            f"or raise {'num_kv_blocks' if fixed else 'kv_cache_memory_bytes'}"
        )


def timed(
    engine: Engine,
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams],
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds until all answers are there, each as long as it was asked to be."""
    start = now()
    outputs = engine.generate(prompts, params)
    seconds = now() - start
    check(outputs)
    return seconds


def check(outputs: Sequence[RequestOutput]) -> None:
    """RackmountError for an answer that was refused or did not reach its length."""
    for output in outputs:
        for answer in output.outputs:
            if answer.finish_reason != "length":
                raise RackmountError(
                    f"an answer ended by {answer.finish_reason!r} after {len(answer.token_ids)} "
                    "tokens; its time says nothing"
                )
