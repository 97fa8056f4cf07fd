"""A step whose results are on their way to the host."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rackmount.execution.batch import PersistentBatch
from rackmount.execution.messages import StepResult
from rackmount.sampling.logprobs import LogprobTensors
from rackmount.sampling.request import SamplingRequest, TokenLogprobs

Owner = tuple[str, SamplingRequest]


def fetch(tensor: Tensor) -> Tensor:
    """The tensor on the host, to be read once the stream has come so far. Waits for nothing."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def fetch_logprobs(tensors: LogprobTensors) -> LogprobTensors:
    return LogprobTensors(
        rows=tensors.rows,
        token_ids=fetch(tensors.token_ids),
        logprobs=fetch(tensors.logprobs),
        ranks=fetch(tensors.ranks),
    )


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Tokens of S rows. Tensors are on the host, and hold their values once the step has run."""

    rows: np.ndarray
    """int32 [S]."""
    positions: np.ndarray
    """int32 [S]: the place of each token in its sequence."""
    tenancy: np.ndarray
    """See `PersistentBatch.expect`."""
    token_ids: Tensor
    """int32 [S or more], -1 where a request must fail."""
    owners: list[Owner]
    """Of the rows."""
    logprobs: LogprobTensors | None


class PendingStep:
    """A `rackmount_registry.executor.Pending` of a `StepResult`."""

    def __init__(
        self,
        batch: PersistentBatch,
        sampled: Sampled | None,
        prompts: dict[str, tuple[int, int, list[LogprobTensors]]],
        event: torch.cuda.Event | None,
    ) -> None:
        self._batch, self._sampled, self._prompts, self._event = batch, sampled, prompts, event
        self._token_ids = np.empty(0, np.int32)
        self._is_settled = False

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]  # torch's

    def settle(self) -> None:
        """Waits for the step, and tells the persistent batch its tokens."""
        if self._is_settled:
            return
        if self._event is not None:
            self._event.synchronize()
        self._is_settled = True
        if self._sampled is not None:
            it = self._sampled
            self._token_ids = it.token_ids.numpy()[: it.rows.size]
            self._batch.fill(it.rows, it.positions, np.maximum(self._token_ids, 0), it.tenancy)

    def result(self) -> StepResult:
        self.settle()
        return StepResult(
            token_ids=np.maximum(self._token_ids, 0),
            failed=self._failed(),
            logprobs=self._token_logprobs(),
            prompt_logprobs={
                request_id: (first, [each for piece in pieces for each in _listed(piece, num)])
                for request_id, (first, num, pieces) in self._prompts.items()
            },
        )

    def _failed(self) -> list[str]:
        if self._sampled is None:
            return []
        owners = self._sampled.owners
        return [owners[at][0] for at in np.flatnonzero(self._token_ids < 0).tolist()]

    def _token_logprobs(self) -> dict[str, TokenLogprobs]:
        if self._sampled is None or self._sampled.logprobs is None:
            return {}
        tensors = self._sampled.logprobs
        owners = [self._sampled.owners[at] for at in tensors.rows.tolist()]
        counts = [sampling.params.logprobs or 0 for _, sampling in owners]
        listed = _listed(tensors, counts)
        return {request_id: entry for (request_id, _), entry in zip(owners, listed, strict=True)}


def _listed(tensors: LogprobTensors, counts: list[int] | int) -> list[TokenLogprobs]:
    """As plain values: the token itself, and the first `counts[i]` of the most likely ones."""
    rows = zip(
        tensors.token_ids.tolist(), tensors.logprobs.tolist(), tensors.ranks.tolist(), strict=True
    )
    if isinstance(counts, int):
        counts = [counts] * len(tensors.ranks)
    return [
        TokenLogprobs(
            token_id=ids[0],
            logprob=values[0],
            rank=rank,
            top=dict(zip(ids[1 : 1 + count], values[1 : 1 + count], strict=True)),
        )
        for (ids, values, rank), count in zip(rows, counts, strict=True)
    ]
