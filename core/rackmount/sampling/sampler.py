"""From the logits of a batch to one token a row."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rackmount.sampling.draw import draw_top_k, draw_top_p, draw_whole
from rackmount.sampling.logprobs import LogprobTensors, gather_logprobs, log_softmax
from rackmount.sampling.order import first_max
from rackmount.sampling.random import row_keys
from rackmount.sampling.rules import apply_rules
from rackmount.sampling.table import Draw, SamplingTable


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """One step's tokens, on the device."""

    token_ids: Tensor
    """int64 [R]; 0 where not `valid`."""
    valid: Tensor
    """bool [R]. False: every token is banned, or one that is not has logit NaN or +inf; the request
    must fail."""
    logprobs: LogprobTensors | None
    """Of the rows that asked; None where none did."""


class Sampler:
    """Samples rows of a `SamplingTable` in one pass; a row's token depends on that row alone."""

    def __init__(self, table: SamplingTable) -> None:
        self.table = table

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray
    ) -> SamplerOutput:
        """Samples one token for each of R distinct rows, and counts it for their penalties.

        Args:
            logits: [R, V], any floating dtype; may be changed.
            rows: int [R], admitted rows of the table.
            positions: int [R], the index that each token takes in its sequence.
            token_ids: int [max_num_seqs, max_model_len], each row's tokens before its position;
                read for bad words alone.
        """
        table = self.table
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        num_logprobs = table.num_logprobs[rows]
        asked = np.flatnonzero(num_logprobs >= 0)
        raw = log_softmax(logits[_index(asked, logits)]) if len(asked) else None
        apply_rules(logits, table, rows, positions, token_ids)
        table.penalties.apply(logits, rows)
        sampled, valid = self._choose(logits, rows, positions)
        table.penalties.observe(rows, sampled)
        if raw is None:
            return SamplerOutput(token_ids=sampled, valid=valid, logprobs=None)
        own = sampled[_index(asked, logits)]
        logprobs = gather_logprobs(asked, raw, own, int(num_logprobs.max()))
        return SamplerOutput(token_ids=sampled, valid=valid, logprobs=logprobs)

    def _choose(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Token ids and `valid` [R]: the best for greedy rows, else one draw for each kind."""
        table = self.table
        token_ids = first_max(logits)
        top = logits.gather(-1, token_ids.unsqueeze(-1))
        draws = table.draws[rows]
        for kind in (Draw.WHOLE, Draw.TOP_K, Draw.TOP_P):
            drawn = np.flatnonzero(draws == kind)
            if not len(drawn):
                continue
            at, numbers = _index(drawn, logits), table.numbers[rows[drawn]]
            keys = row_keys(table.seeds[rows[drawn]], positions[drawn])
            x, top_x = logits[at].float(), top[at].float()
            settings = torch.from_numpy(numbers).to(logits.device)
            if kind == Draw.WHOLE:
                token_ids[at] = draw_whole(x, top_x, settings, keys)
            elif kind == Draw.TOP_K:
                width = int(numbers[:, 1].max())
                token_ids[at] = draw_top_k(x, top_x, settings, keys, width)
            else:
                token_ids[at] = draw_top_p(x, top_x, settings, keys)
        valid = top.squeeze(-1).isfinite()
        return token_ids.where(valid, 0), valid


def _index(selected: np.ndarray, logits: Tensor) -> Tensor | slice:
    """An index of the selected among R rows, which copies nothing where it is all of them."""
    if len(selected) == len(logits):
        return slice(None)
    return torch.from_numpy(selected).to(logits.device)
