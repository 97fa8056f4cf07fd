"""Limits of the scheduler, fixed for an engine's life."""

from dataclasses import dataclass
from typing import Literal, get_args

from rackmount_registry.errors import ConfigError

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    num_blocks: int
    """Blocks of the KV pool."""
    block_size: int
    """Tokens in a block."""
    max_num_seqs: int
    """Most requests in one step: rows of the persistent batch."""
    max_num_batched_tokens: int
    """Token budget of a step."""
    max_model_len: int
    """Longest sequence, prompt and output together."""
    vocab_size: int
    long_prefill_token_threshold: int = 0
    """Most tokens of one request in a step; 0 leaves that to the budget."""
    policy: Policy = "fcfs"
    """"fcfs": by arrival. "priority": lower `Request.priority` first, then by arrival."""
    enable_prefix_caching: bool = True
    enable_mixed_steps: bool = True
    """Prompts are computed beside tokens that are decoded. Otherwise, while they fill steps, by
    themselves, and first: decoding waits meanwhile. Where the pool would not hold the whole prompt
    and a block more for each running request, steps are mixed all the same."""

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} must be "
                "0 (off) or a number of tokens"
            )
        if self.policy not in get_args(Policy):
            raise ConfigError(
                f"policy={self.policy!r} must be one of {', '.join(get_args(Policy))}"
            )

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size
