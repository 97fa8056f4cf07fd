"""One sequence on its way through the engine."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

import numpy as np

from rackmount.sampling.request import SamplingRequest
from rackmount.scheduling.block_pool import Block

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What the caller asks for, and below it what the scheduler alone writes."""

    request_id: str
    prompt_token_ids: np.ndarray
    """int32 [P]."""
    max_tokens: int
    """Most output tokens; the model's length and the pool may end it earlier, as "length" too."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output: every EOS too, unless it is to be ignored."""
    min_tokens: int = 0
    """No stop token counts before this many output tokens."""
    priority: int = 0
    """Lower goes first, under the policy "priority"."""
    cache_salt: str | None = None
    """Prefix hits happen only between requests of equal salt."""
    use_cached_prefix: bool = True
    """False: every prompt position is computed, as prompt logprobs need."""
    sampling: SamplingRequest | None = None
    """Goes to the worker untouched."""

    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it."""
    output_token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 [O]: all, once it is finished or waits again; while it runs, those from before."""
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache when it first ran."""
    queued_at: float = 0.0
    """By the monotonic clock of this process, as below."""
    started_at: float | None = None
    """When it first ran; None before, and again once its first token is told."""
    order: tuple[int, int] = (0, 0)
    """Its place among all requests: lower is served first and preempted last."""
    row: int = -1
    """Row of the persistent batch while it runs."""
    blocks: list[Block] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Hash chain of its full blocks, as far as it was needed."""

    def __post_init__(self) -> None:
        self.prompt_token_ids = np.asarray(self.prompt_token_ids, np.int32)

    @property
    def num_tokens(self) -> int:
        """Length of `token_ids`."""
        return self.prompt_token_ids.size + self.output_token_ids.size

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [P + O]: prompt and output of a request that waits."""
        if not self.output_token_ids.size:
            return self.prompt_token_ids
        return np.concatenate((self.prompt_token_ids, self.output_token_ids))
