"""Errors that users and plugin authors meet. Each message carries the value, the rule and the legal
values."""

import difflib
from collections.abc import Iterable, Sequence

MAX_LISTED = 8


class RackmountError(Exception):
    """Base of every error that rackmount raises on purpose."""


class ConfigError(RackmountError, ValueError):
    """A model configuration, an engine argument or a plugin option that breaks a rule."""


class PluginError(RackmountError):
    """A plugin that cannot be loaded, or a name that no working plugin offers."""


class SelectionError(RackmountError, ValueError):
    """No candidate of a kind fits, or the one that was asked for does not."""

    def __init__(self, message: str, candidates: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.candidates = tuple(candidates)
        """All candidates with what refused them (see `selection`), as `explain` prints them."""


class CheckpointError(RackmountError, ValueError):
    """A checkpoint whose files, tensors or shapes are not what the model needs."""


class RequestError(RackmountError, ValueError):
    """A request that is refused: its prompt or its options."""


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """The legal name closest to `name`, in upper or lower case, or None where none is close."""
    by_lower = {each.lower(): each for each in legal}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """` (did you mean 'x'?)` where a legal name is close, else an empty string."""
    match = nearest(name, legal)
    return f" (did you mean {match!r}?)" if match else ""


def listed(names: Sequence[str], limit: int = MAX_LISTED) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
