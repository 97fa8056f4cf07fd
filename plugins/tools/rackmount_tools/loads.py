"""What the engine is asked to do: prompts of random ids, and how long each answer is."""

import random
from dataclasses import dataclass, replace

import numpy as np

from rackmount_registry.errors import ConfigError

Prompts = list[list[int]]
NANO_VOCAB_SIZE = 10_001
"""All ids of the workload `nano` are below."""
NANO_LONGEST = 1024 + 1024
"""Tokens of its longest request, at most: prompt and output."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts, and the number of tokens that each is answered with."""

    prompts: Prompts
    output_lens: list[int]
    vocab_size: int
    """All ids are below."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def fresh(self, seed: int) -> "Workload":
        """The same lengths with other ids, so that no prefix is known."""
        generator = np.random.default_rng(seed)
        prompts = [generator.integers(0, self.vocab_size, len(p)).tolist() for p in self.prompts]
        return replace(self, prompts=prompts)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> Prompts:
    """`count` prompts of `length` ids below `vocab_size`."""
    return np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()


def uniform(num_prompts: int, input_len: int, output_len: int, vocab_size: int) -> Workload:
    """All alike."""
    return Workload(
        prompts=random_prompts(num_prompts, input_len, vocab_size),
        output_lens=[output_len] * num_prompts,
        vocab_size=vocab_size,
    )


def nano(vocab_size: int) -> Workload:
    """The workload of nano-vllm's README: 256 prompts of 100 to 1024 ids up to 10000, answered with
    100 to 1024 tokens each, 133,966 in all.

    Raises:
        ConfigError: the model's vocabulary is smaller.
    """
    if vocab_size < NANO_VOCAB_SIZE:
        raise ConfigError(
            f"workload='nano' needs a vocabulary of {NANO_VOCAB_SIZE} tokens, and the model has "
            f"{vocab_size}; choose workload='uniform'"
        )
    draw = random.Random(0).randint
    prompts = [[draw(0, 10_000) for _ in range(draw(100, 1024))] for _ in range(256)]
    output_lens = [draw(100, 1024) for _ in range(256)]
    return Workload(prompts=prompts, output_lens=output_lens, vocab_size=NANO_VOCAB_SIZE)
