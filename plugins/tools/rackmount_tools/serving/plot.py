"""Latency against rate, as a picture."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rackmount_registry.errors import ConfigError

PANELS = {
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "e2e_ms": "whole answer, ms",
}
LINES = {"p50": "-", "p90": "--", "p99": ":"}


def require_plot(rates: Sequence[float]) -> None:
    """ConfigError where no picture could be drawn: said before the load, not after it."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'rackmount-plugins-tools[plot]', or leave it out"
        )
    if all(map(math.isinf, rates)):
        raise ConfigError("--plot draws latency against rate; give --rate a finite one or more")


def plot(file: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a PNG of the percentiles at each finite rate, lowest first."""
    from matplotlib.figure import Figure

    finite = [row for row in rows if row["rate"] != "inf"]
    finite.sort(key=lambda row: row["rate"])
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title)
    for axes, (key, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        measured = [row for row in finite if row[key]]
        rates = [row["rate"] for row in measured]
        for name, style in LINES.items():
            axes.plot(rates, [row[key][name] for row in measured], style, marker="o", label=name)
        goals = {goal for row in finite if (goal := row.get("goals_ms", {}).get(key[:-3]))}
        for goal in goals:
            axes.axhline(goal, color="gray", linewidth=1, label="goal")
        axes.set(xlabel="requests asked per second", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, format="png", dpi=120)
