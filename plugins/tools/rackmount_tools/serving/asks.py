"""What a server is asked: prompts of random ids, or those of a file."""

import json
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from rackmount_registry.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEYS = ("prompt", "messages", "max_tokens")
"""Of a line of a file."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: where it goes, and the fields that are its own."""

    path: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of prompts and answers: each uniformly drawn from its mean, give or take `spread` of
    it."""

    input_len: int
    output_len: int
    spread: float = 0.0

    def draw(self, random: np.random.Generator, mean: int, count: int) -> list[int]:
        reach = int(mean * self.spread)
        return random.integers(max(1, mean - reach), mean + reach + 1, count).tolist()


def random_asks(count: int, lengths: Lengths, vocab_size: int, seed: int) -> list[Ask]:
    """Prompts of random ids below `vocab_size`. Other seeds share no prefix."""
    random = np.random.default_rng(seed)
    input_lens = lengths.draw(random, lengths.input_len, count)
    output_lens = lengths.draw(random, lengths.output_len, count)
    return [
        Ask(
            path=COMPLETIONS,
            fields={
                "prompt": random.integers(0, vocab_size, given).tolist(),
                "max_tokens": wanted,
            },
        )
        for given, wanted in zip(input_lens, output_lens, strict=True)
    ]


def read_asks(file: Path, count: int, output_len: int) -> list[Ask]:
    """The lines of a JSONL file, from the start again where `count` is more.

    A line is an object with "prompt" (text or ids) or "messages" (of a chat), and "max_tokens"
    where it is not `output_len`.

    Raises:
        ConfigError: a line is something else; it is named.
    """
    with file.open(encoding="utf-8") as lines:
        asks = [
            _ask(f"{file}:{number}", line, output_len)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    if not asks:
        raise ConfigError(f"{file} holds no request; each line must be a JSON object")
    return list(islice(cycle(asks), count))


def _ask(place: str, line: str, output_len: int) -> Ask:
    legal = f"a JSON object with prompt or messages; its keys may be {', '.join(KEYS)}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} must be {legal}: {error}") from error
    if not isinstance(fields, dict) or fields.keys() - set(KEYS):
        raise ConfigError(f"{place} must be {legal}, and is {line.strip()[:80]}")
    if ("prompt" in fields) == ("messages" in fields):
        raise ConfigError(f"{place} must be {legal}, not both of them and not neither")
    path = COMPLETIONS if "prompt" in fields else CHAT
    return Ask(path=path, fields={"max_tokens": output_len} | fields)
