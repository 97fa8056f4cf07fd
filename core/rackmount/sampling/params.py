"""What a request asks of the sampler and of its own end.

| parameter | value | meaning |
| --- | --- | --- |
| `temperature` | 0, or anything below 1e-5 | greedy: the most likely token, the lowest id among equals; `top_k`, `top_p`, `min_p` and `seed` play no part |
| `temperature` | 1 | the model's own distribution |
| `top_k` | 0 or -1 | off |
| `top_k` | 1 | greedy |
| `top_k` | the vocabulary's size or more | off |
| `top_p` | 1 | off |
| `top_p` | 0 | greedy |
| `min_p` | 0 | off |
| `min_p` | 1 | only the tokens exactly as likely as the most likely one |
| `repetition_penalty` | 1 | off |
| `presence_penalty`, `frequency_penalty` | 0 | off |
| `allowed_token_ids`, `logit_bias`, `bad_words` | None | off |
| `grammar` | None | off |
| `min_tokens` | 0 | off |
| `max_tokens` | None | until the engine's `max_model_len` |
| `seed` | None | drawn by the engine |
| `logprobs`, `prompt_logprobs` | None | none |
| `logprobs`, `prompt_logprobs` | 0 | those of the sampled (or given) token alone |

Order of processing: allowed ids, the grammar, bad words and the ban of stop ids below `min_tokens` (each sets logits to
-inf), then `logit_bias` (added), then the repetition, frequency and presence penalties, then temperature, then top-k,
then top-p over what top-k left, renormalized, then min-p. A greedy row takes the largest logit after the penalties.

Equal logits at the edge of top-k or top-p: the lowest ids are kept, so top-k keeps exactly k tokens. top-p keeps the
fewest most likely tokens whose mass reaches `top_p`. min-p keeps every token at least `min_p` times as likely as the
most likely one.

An answer under a grammar ends by the model's end of sequence, or by a stop id that is a special token. They come only
where the text is whole, and below `min_tokens` too where the grammar has nothing to add.
"""  # noqa: E501  # a row of the table is a line

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import NamedTuple, Self

from rackmount_registry.errors import ConfigError, did_you_mean
from rackmount_registry.grammar import GrammarSpec

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: there, a logit 0.001 behind has e^-100 of the mass."""
MAX_BIASES = 1024
"""Most ids of `logit_bias`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """One request's options, checked at construction; the module says what edge values mean.

    Raises:
        TypeError: an unknown keyword, or a value of the wrong type (a bool is not an int).
        ConfigError: a value that is not finite or out of range (a `ValueError`).
    """

    n: int = 1
    """Answers to the same prompt, each with a seed of its own."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of every token in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the token is in the output."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of at most `MAX_BIASES` ids."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    """Their last token is banned where it would complete one, also one begun in the prompt."""
    grammar: GrammarSpec | None = None
    """What the answer must be."""
    min_tokens: int = 0
    """No end-of-sequence and no stop id before so many tokens."""
    max_tokens: int | None = None
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs in the batch."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """How many most likely tokens beside the sampled one, by the model's own distribution."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __new__(cls, *args: object, **given: object) -> Self:
        """Names the nearest parameter where a keyword is unknown."""
        names = [field.name for field in fields(cls)]
        for name in given.keys() - set(names):
            raise TypeError(f"unexpected keyword {name!r}{did_you_mean(name, names)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, rule in _NUMBERS.items():
            rule.check(name, getattr(self, name))
        for name in _FLAGS:
            _check_type(name, getattr(self, name), bool, "True or False")
        for name in ("allowed_token_ids", "stop_token_ids"):
            _check_ids(name, _listed(name, getattr(self, name), "a list of token ids"))
        _check_bias(self.logit_bias)
        _check_type("grammar", self.grammar, GrammarSpec | None, "a GrammarSpec, or None")
        _check_words("bad_words", self.bad_words)
        _check_words("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ConfigError(
                "allowed_token_ids=[] allows no token; give at least one id, or None for all"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; "
                f"it must be an integer from 0 to {self.max_tokens}"
            )
        if self.stop_strings and not self.detokenize:
            raise ConfigError(
                f"stop={self.stop!r} needs text, but detokenize=False; "
                "use stop_token_ids, or detokenize=True"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without any random number."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0 or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty for None."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def stop_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Every id that ends the request: its own, and the model's unless `ignore_eos`."""
        return frozenset(self.stop_token_ids or ()).union(() if self.ignore_eos else eos_token_ids)

    def validate_for(
        self,
        vocab_size: int,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Checks what only the model can tell.

        Raises:
            ConfigError: an id outside the vocabulary, more logprobs than it has ids, or
                `min_tokens` where every allowed id is a stop id.
        """
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise ConfigError(
                        f"{name} holds id {token_id}, which is outside the vocabulary; "
                        f"legal ids are 0 to {vocab_size - 1}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and wanted > vocab_size:
                raise ConfigError(
                    f"{name}={wanted} is above the size of the vocabulary; "
                    f"it must be an integer from 0 to {vocab_size}"
                )
        if self.min_tokens and self.allowed_token_ids is not None:
            stop_ids = self.stop_ids(eos_token_ids)
            if stop_ids.issuperset(self.allowed_token_ids):
                raise ConfigError(
                    f"min_tokens={self.min_tokens} bans every id of "
                    f"allowed_token_ids={self.allowed_token_ids}: all of them end the request; "
                    "allow another id, or use min_tokens=0"
                )


class _Number(NamedTuple):
    """The legal values of a numeric parameter, ends included."""

    kind: type[int] | type[float]
    low: float
    high: float = sys.float_info.max
    note: str = ""
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        if value is None and self.optional:
            return
        legal = "an integer" if self.kind is int else "a finite number"
        legal += f" from {self.low}" + (f" to {self.high}" if self.high < 1e300 else " up")
        legal += f" ({self.note})" if self.note else ""
        number = value
        if isinstance(number, bool) or not isinstance(number, int | self.kind):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be {legal}")
        if not self.low <= number <= self.high:  # false for NaN, too
            raise ConfigError(f"{name}={value!r} is out of range; it must be {legal}")


_NUMBERS: Mapping[str, _Number] = {
    "n": _Number(int, 1, 1024),
    "temperature": _Number(float, 0, note="0 is greedy"),
    "top_p": _Number(float, 0, 1, "1 is off, 0 is greedy"),
    "top_k": _Number(int, -1, note="0 and -1 are off, 1 is greedy"),
    "min_p": _Number(float, 0, 1, "0 is off"),
    "repetition_penalty": _Number(float, 0.01, 100, "1 is off"),
    "presence_penalty": _Number(float, -2, 2, "0 is off"),
    "frequency_penalty": _Number(float, -2, 2, "0 is off"),
    "min_tokens": _Number(int, 0),
    "max_tokens": _Number(int, 1, optional=True),
    "seed": _Number(int, 0, 2**64 - 1, optional=True),
    "logprobs": _Number(int, 0, optional=True),
    "prompt_logprobs": _Number(int, 0, optional=True),
}
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
_BIAS = _Number(float, -100, 100)
_ID = _Number(int, 0, note="a token id")


def _check_type(name: str, value: object, kind: type | UnionType, legal: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be {legal}")


def _listed(name: str, value: object, legal: str) -> list[object]:
    _check_type(name, [] if value is None else value, list, f"{legal}, or None")
    return value if isinstance(value, list) else []


def _check_ids(name: str, ids: Iterable[object]) -> None:
    for token_id in ids:
        _ID.check(f"{name} id", token_id)


def _check_bias(bias: object) -> None:
    _check_type("logit_bias", bias or {}, dict, "a dict from token id to number, or None")
    given = bias if isinstance(bias, dict) else {}
    if len(given) > MAX_BIASES:
        raise ConfigError(
            f"logit_bias has {len(given)} ids; it must have from 0 to {MAX_BIASES}, or be None"
        )
    for token_id, value in given.items():
        _ID.check("logit_bias id", token_id)
        _BIAS.check(f"logit_bias[{token_id}]", value)


def _check_words(name: str, words: object) -> None:
    for word in _listed(name, words, "a list of strings"):
        _check_type(f"{name} entry", word, str, "a string")
        if not word:
            raise ConfigError(f"{name} holds an empty string; each entry needs a character or more")
