"""Figures of many exchanges."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rackmount_registry.errors import ConfigError
from rackmount_tools.serving.exchange import Exchange

PERCENTILES = (50, 90, 95, 99)
GOALS = ("ttft", "tpot", "e2e")
"""Times of a request that a goal may be set for."""


def parse_goals(words: Sequence[str]) -> dict[str, float]:
    """Seconds by name, of words such as "ttft:500", in milliseconds."""
    goals = {}
    for word in " ".join(words).split():
        name, _, text = word.partition(":")
        try:
            goals[name] = float(text) / 1e3
        except ValueError:
            goals[name] = math.nan
        if name not in GOALS or not goals[name] > 0:
            raise ConfigError(
                f"goodput={word!r} must be NAME:MILLISECONDS, and NAME one of {', '.join(GOALS)}"
            )
    return goals


def figures_of(
    rate: float, exchanges: Sequence[Exchange], goals: Mapping[str, float]
) -> dict[str, Any]:
    """Of all requests of one rate. Times are of those that were answered; rates count from the
    first that was sent to the end of the last."""
    answered = [each for each in exchanges if each.error is None]
    seconds = max(each.end for each in exchanges) - min(each.sent for each in exchanges)
    tokens_in = sum(each.prompt_tokens for each in answered)
    tokens_out = sum(each.output_tokens for each in answered)
    figures = {
        "rate": "inf" if math.isinf(rate) else rate,
        "requests": len(exchanges),
        "answered": len(answered),
        "errors": _errors(exchanges),
        "finish_reasons": _counts(each.finish_reason for each in answered),
        "seconds": seconds,
        "requests_per_s": len(answered) / seconds,
        "prompt_tokens": tokens_in,
        "output_tokens": tokens_out,
        "output_tokens_per_s": tokens_out / seconds,
        "total_tokens_per_s": (tokens_in + tokens_out) / seconds,
        "ttft_ms": spread([each.ttft for each in answered]),
        "itl_ms": spread([gap for each in answered for gap in each.gaps]),
        "tpot_ms": spread([each.tpot for each in answered if each.tpot is not None]),
        "e2e_ms": spread([each.e2e for each in answered]),
        "late_ms": spread([each.sent - each.due for each in exchanges]),
    }
    if answered:
        figures["tokens_per_chunk"] = tokens_out / sum(len(each.chunks) for each in answered)
    if goals:
        good = sum(_meets(each, goals) for each in answered)
        figures["goals_ms"] = {name: limit * 1e3 for name, limit in goals.items()}
        figures["goodput_per_s"] = good / seconds
        figures["good_share"] = good / len(exchanges)
    return figures


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and the largest, in milliseconds; None of nothing."""
    if not seconds:
        return None
    ms = np.array(seconds) * 1e3
    points = {f"p{p}": float(np.percentile(ms, p)) for p in PERCENTILES}
    return {"mean": float(ms.mean()), **points, "max": float(ms.max())}


def _meets(seen: Exchange, goals: Mapping[str, float]) -> bool:
    """A time that an answer does not have, as the TPOT of one token, is within any goal."""
    times = {"ttft": seen.ttft, "tpot": seen.tpot or 0.0, "e2e": seen.e2e}
    return all(times[name] <= limit for name, limit in goals.items())


def _errors(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """By kind: how many, and the words of the first."""
    errors: dict[str, Any] = {}
    for each in exchanges:
        if each.error is not None:
            entry = errors.setdefault(each.error, {"count": 0, "first": each.error_text})
            entry["count"] += 1
    return errors


def _counts(names: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[str(name)] = counts.get(str(name), 0) + 1
    return counts
