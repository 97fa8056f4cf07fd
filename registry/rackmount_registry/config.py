"""A model's config.json, read so that no key is forgotten, and defaults that models share.

A key that no reader asked for may still change numbers: a forgotten `rms_norm_eps` or
`sliding_window` gives wrong text and no error. So every read is recorded, and what was not read
must be on the list of harmless keys.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rackmount_registry.errors import ConfigError, did_you_mean

HARMLESS_BY_REASON = {
    "says what the model is and who saved it; used to find the architecture": """
        _commit_hash _name_or_path architectures auto_map is_encoder_decoder model_type
        transformers.js_config transformers_version""",
    "read by the engine, for dtype, context length and stop ids": """
        bos_token_id dtype eos_token_id max_position_embeddings pad_token_id torch_dtype""",
    "read by the mount, for the quantization scheme": "quantization_config quantization_file",
    "training only": """
        attention_dropout aux_loss_alpha ep_size initializer_range pretraining_tp
        router_aux_loss_coef router_jitter_noise seq_aux""",
    "how transformers runs or returns, not what it computes": """
        _attn_implementation_autoset attn_implementation chunk_size_feed_forward
        output_attentions output_hidden_states output_router_logits return_dict use_cache""",
    "heads for classification": "id2label label2id problem_type",
    "sampling, which generation_config.json rules": "do_sample max_length temperature top_p",
}

HARMLESS = frozenset(" ".join(HARMLESS_BY_REASON.values()).split())
"""Keys that no model needs to read."""
MOST_SHOWN = 300
"""Characters of a value in an error."""

T = TypeVar("T")


class ConfigReader:
    """config.json as attributes, with a record of what was read.

    `config.key` requires the key, `config.get(key, default)` does not; `positive`, `number` and
    `flag` also hold the value to its type, which a model's sizes need. A key read whole counts
    with all that is inside it; `sub` reads key by key.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str = "config.json",
        harmless: frozenset[str] = HARMLESS,
    ) -> None:
        """
        Args:
            values: the parsed file.
            file: what error messages call it.
            harmless: keys that need no reader.
        """
        self._values = values
        self._file = file
        self._harmless = harmless
        self._read: set[str] = set()
        self._subs: dict[str, ConfigReader] = {}

    def __getattr__(self, key: str) -> Any:
        """The value of a required key.

        Raises:
            ConfigError: the key is missing or null.
        """
        if key.startswith("_"):  # what copy and pickle ask for is no key
            raise AttributeError(key)
        value = self.get(key)
        if value is None:
            state = "has null for" if key in self._values else "lacks"
            near = did_you_mean(key, self._values.keys() - {key})
            raise ConfigError(f"{self._file} {state} the key {key!r}, which the model needs{near}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` where it is missing. A null stays None: where the
        default of a family is on, null is off."""
        self._read.add(key)
        return self._values.get(key, default)

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer. `default` stands for a missing or null key; without one the key is
        required.

        Raises:
            ConfigError: it is missing, or anything else, be it a float or a text that spells one.
        """
        return self._typed(key, default, _is_count, "a positive integer")

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; the rest as `positive`."""
        return self._typed(key, default, lambda x: _is_number(x) and x > 0, "a positive number")

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false; the rest as `positive`."""
        return self._typed(key, default, lambda x: isinstance(x, bool), "true or false")

    def _typed(self, key: str, default: T | None, legal: Callable[[Any], bool], rule: str) -> T:
        value: T | None = self.get(key)
        if value is None:
            value = getattr(self, key) if default is None else default
        if not legal(value):
            raise self.error(key, f"must be {rule}")
        return cast(T, value)

    def sub(self, key: str) -> "ConfigReader | None":
        """The nested object at `key` as a reader of its own, the same one each time; None where
        there is none.

        Raises:
            ConfigError: the value is not an object.
        """
        if key not in self._subs:
            values = self._values.get(key)
            if values is None:
                self._read.add(key)
                return None
            if not isinstance(values, Mapping):
                raise self.error(key, "must be an object")
            self._subs[key] = ConfigReader(values, f"{self._file}: {key}", frozenset())
        return self._subs[key]

    def subs(self, key: str) -> "list[ConfigReader]":
        """The objects of the list at `key`, each as a reader that its caller holds to account.

        Raises:
            ConfigError: the value is no list of objects.
        """
        values = self.get(key)
        if not isinstance(values, list) or not all(isinstance(each, Mapping) for each in values):
            raise self.error(key, "must be a list of objects")
        return [
            ConfigReader(each, f"{self._file}: {key}[{index}]", frozenset())
            for index, each in enumerate(values)
        ]

    def unread(self, harmless: frozenset[str] = frozenset()) -> list[str]:
        """Keys that nobody read, sorted; nested ones as "outer.inner".

        `harmless` are those that an architecture names beside the ones of every model.
        """
        keys = []
        for key in self._values.keys() - self._read - self._harmless - harmless:
            if key in self._subs:
                inner = (name.partition(".")[2] for name in harmless if name.startswith(f"{key}."))
                keys += [f"{key}.{name}" for name in self._subs[key].unread(frozenset(inner))]
            else:
                keys.append(key)
        return sorted(keys)

    def require_all_read(self, harmless: frozenset[str] = frozenset()) -> None:
        """Holds the record against the file, once the model is built.

        Raises:
            ConfigError: keys are left that nobody read and that are not `harmless`.
        """
        if keys := self.unread(harmless):
            raise ConfigError(
                f"{self._file}: rackmount does not read {', '.join(keys)}, and what it passes over "
                "might change the model's numbers; remove what is sure to change none"
            )

    def error(self, key: str, rule: str) -> ConfigError:
        """The error to raise for a key that breaks a rule: file, key, value and rule. Of a long
        value the beginning."""
        value = repr(self._values.get(key))
        shown = value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}..."
        return ConfigError(f"{self._file}: {key}={shown} {rule}")


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]  # a number here


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def head_dim(c: ConfigReader) -> int:
    """Size of one attention head: `head_dim`, else hidden_size / num_attention_heads."""
    hidden, heads = c.positive("hidden_size"), c.positive("num_attention_heads")
    if c.get("head_dim") is None and hidden % heads:
        raise c.error("hidden_size", f"must be a multiple of num_attention_heads={heads}")
    return c.positive("head_dim", hidden // heads)


def tied(c: ConfigReader, default: bool = False) -> bool:
    """Whether the output head is the embedding.

    `default` stands for a missing key and belongs to the architecture: False for Llama, Qwen3,
    Mixtral and DeepSeek, whose files (as transformers 4 saved them) state the key only where it
    differs from that.
    """
    return c.flag("tie_word_embeddings", default)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding in one spelling; None where the type has no such value or the file none."""

    rope_type: str
    """One of `ROPE_KEYS`."""
    theta: float
    partial_rotary_factor: float = 1.0
    """Leading part of each head that is rotated."""
    factor: float = 1.0
    """How many times the original context length is stretched."""
    original_max_position: int | None = None
    """Context length before stretching, where the type needs it."""
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """yarn: what cos and sin are multiplied by; None: to be derived from factor and mscale."""


ROPE_SHARED = ("rope_theta", "partial_rotary_factor")

ROPE_KEYS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": """
        factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale
        mscale_all_dim truncate""",
}
"""Type -> the keys that it knows beside those of `ROPE_SHARED`."""

ROPE_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "factor": ("at least 1", lambda x: x >= 1),
    "mscale": ("at least 0", lambda x: x >= 0),
    "mscale_all_dim": ("at least 0", lambda x: x >= 0),
    "original_max_position_embeddings": ("a positive integer", _is_count),
    "partial_rotary_factor": ("above 0 and at most 1", lambda x: 0 < x <= 1),
}
"""Legal values; other numbers must be positive."""


def rope(c: ConfigReader, default_theta: float = 10000.0) -> RopeConfig:
    """The rotary embedding from either spelling of config.json.

    Old: `rope_theta` and `partial_rotary_factor` at the top, the rest in `rope_scaling`, with
    `type` or `rope_type`. New, by transformers 5: all in `rope_parameters`. `default_theta` belongs
    to the architecture: 1e6 for Mixtral.

    Raises:
        ConfigError: an unknown type or key, an illegal value, or two spellings that disagree.
    """
    top = {key: value for key in ROPE_SHARED if (value := c.get(key)) is not None}
    old, new = _rope_dict(c, "rope_scaling"), _rope_dict(c, "rope_parameters")
    for key, given in ((key, given) for key in top for given in (old, new)):
        if top[key] != given.get(key, top[key]):
            raise c.error(key, f"disagrees with {given[key]!r} in the rope's own object")
    shared = {"rope_theta": default_theta} | top
    shared |= {key: new[key] for key in ROPE_SHARED if key in new}
    found = _rope_config(c, "rope_parameters" if new else "rope_scaling", shared | (new or old))
    if old and new and _rope_config(c, "rope_scaling", shared | old) != found:
        raise c.error("rope_scaling", f"disagrees with rope_parameters={new}")
    return found


def _rope_dict(c: ConfigReader, key: str) -> dict[str, Any]:
    """One of the two objects, nulls left out, with its type under `rope_type`."""
    values = c.get(key) or {}
    if not isinstance(values, Mapping):
        raise c.error(key, "must be an object")
    given = {name: value for name, value in values.items() if value is not None}
    old_name = given.pop("type", None)
    if old_name is not None and given.setdefault("rope_type", old_name) != old_name:
        raise c.error(key, "names two different types")
    return given


def _rope_config(c: ConfigReader, source: str, given: dict[str, Any]) -> RopeConfig:
    """`given`, from the key `source`, checked and completed."""
    kind = given.pop("rope_type", "default")
    if kind not in list(ROPE_KEYS):
        raise c.error(
            source, f"has unknown rope_type {kind!r}; choose one of {', '.join(ROPE_KEYS)}"
        )
    keys = ROPE_KEYS[kind].split()
    if unknown := sorted(given.keys() - {*keys, *ROPE_SHARED}):
        legal = ", ".join((*keys, *ROPE_SHARED))
        raise c.error(
            source, f"has keys that {kind} does not know: {', '.join(unknown)}; legal: {legal}"
        )
    if "original_max_position_embeddings" in keys:
        length = c.positive("max_position_embeddings")
        given.setdefault("original_max_position_embeddings", length)
    for key, value in given.items():
        _check_rope_value(c, source, key, value)
    theta, original = given.pop("rope_theta"), given.pop("original_max_position_embeddings", None)
    if kind == "yarn" and "factor" not in given:
        given["factor"] = c.positive("max_position_embeddings") / original
        _check_rope_value(c, source, "factor", given["factor"])
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if key in keys and key not in given:
            raise c.error(source, f"lacks {key}, which {kind} needs")
    found = RopeConfig(rope_type=kind, theta=theta, original_max_position=original, **given)
    if found.beta_fast < found.beta_slow:
        raise c.error(source, "must have beta_fast >= beta_slow, 32 and 1 where not given")
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise c.error(source, "must have high_freq_factor > low_freq_factor")
    return found


def _check_rope_value(c: ConfigReader, source: str, key: str, value: object) -> None:
    if key == "truncate":
        rule, legal = "true or false", isinstance(value, bool)
    else:
        rule, test = ROPE_RULES.get(key, ("positive", lambda x: x > 0))
        legal = _is_number(value) and test(value)
    if not legal:
        raise c.error(source, f"has {key}={value!r}, which must be {rule}")
