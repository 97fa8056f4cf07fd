"""Grammars: what an answer may be, and which tokens may come next so that it becomes that.

A grammar is a set of texts. Tokens stand for their bytes; a special token has none and is never
part of a text. The tokens that end an answer come only where what is there is one of the texts.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol, get_args

from rackmount_registry.descriptors import GrammarForm
from rackmount_registry.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

FORMS: tuple[GrammarForm, ...] = get_args(GrammarForm)


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """What an answer must be, said in exactly one form. Plain values, and hashable.

    Raises:
        TypeError: a value of the wrong type.
        ConfigError: no form or several, an empty one, or text that is no Unicode.
    """

    json_schema: str | None = None
    """JSON Schema, as JSON text: a value that it accepts."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A text that the whole expression matches."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    ebnf: str | None = None
    """What the rule `root` makes, in the notation of llama.cpp's grammars (GBNF)."""

    def __post_init__(self) -> None:
        for name in ("json_schema", "regex", "ebnf"):
            _check_text(name, getattr(self, name))
        if not isinstance(self.json_object, bool):
            raise TypeError(f"json_object={self.json_object!r} must be True or False")
        if self.choice is not None:
            if not isinstance(self.choice, list | tuple):
                raise TypeError(f"choice={self.choice!r} must be a tuple of strings")
            object.__setattr__(self, "choice", tuple(self.choice))
            for text in self.choice:
                _check_text("choice entry", text or "", optional=False)
        given = [each.name for each in fields(self) if getattr(self, each.name)]
        if len(given) != 1:
            raise ConfigError(
                f"a grammar is given as {' and '.join(given) or 'nothing'}; "
                f"give exactly one of {', '.join(FORMS)}, and not empty"
            )

    @property
    def form(self) -> GrammarForm:
        """The one that is given."""
        return next(form for form in FORMS if getattr(self, form))


def _check_text(name: str, value: object, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string")
    if not value:
        raise ConfigError(f"{name} is empty; it needs a character or more")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can carry
        raise ConfigError(f"{name}={value!r} is no Unicode text: {error}") from error


@dataclass(frozen=True, kw_only=True)
class GrammarContext:
    """What a grammar backend is built from, where it is first needed."""

    tokenizer: "PreTrainedTokenizerBase"
    vocab_size: int
    """V, of the model: the tokenizer may know fewer ids, or more."""


class Matcher(Protocol):
    """One answer on its way."""

    @property
    def is_terminated(self) -> bool:
        """Whether an end was accepted: nothing may follow."""

    def accept(self, token_id: int) -> bool:
        """Takes the next token. False, with nothing changed, where it may not come here."""

    def fill_bitmask(self, bitmask: "np.ndarray") -> None:
        """Writes which tokens may come next, into int32 [ceil(V / 32)]: token i is bit i % 32 of
        word i // 32. Not for a matcher that is terminated."""


class Grammar(Protocol):
    """A compiled grammar, of which any number of answers may be under way."""

    def matcher(self, end_ids: Collection[int]) -> Matcher:
        """A new answer. `end_ids` end it, and are no part of its text even where they have one."""


class GrammarBackend(Protocol):
    """Compiles grammars. Any thread may call it.

    Raises:
        RequestError: the grammar is none, is not supported, or has no text; the message says why.
    """

    def check(self, spec: GrammarSpec) -> None:
        """Raises where `compile` would, in little time and without the tokenizer's vocabulary."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """The grammar over the tokenizer's vocabulary. Quick for one that was compiled lately."""
