"""Bans and biases, the first of the logit processors; rows without any cost nothing."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.sampling.grammars import num_words
from rackmount.sampling.table import SamplingTable


def apply_rules(
    logits: Tensor,
    table: SamplingTable,
    rows: np.ndarray,
    positions: np.ndarray,
    token_ids: np.ndarray,
) -> None:
    """Changes logits [R, V] in place: allowed ids, grammars, then bad words and early stop ids,
    then bias.

    `token_ids` [max_num_seqs, max_model_len] holds each row's tokens before `positions` [R].
    """
    asked = np.flatnonzero(table.has_rules[rows]).tolist()
    masks = [(at, banned) for at in asked if (banned := table.rules[rows[at]].banned) is not None]
    if masks:
        index = upload(np.array([at for at, _ in masks]), logits.device)
        banned = torch.stack([mask for _, mask in masks])
        logits[index] = logits[index].masked_fill_(banned, -torch.inf)
    governed = [at for at in asked if table.rules[rows[at]].grammar is not None]
    if governed:
        _apply_grammars(logits, table, rows, positions, token_ids, governed)
    bans: list[tuple[int, int]] = []
    biases: list[tuple[int, int]] = []
    values: list[float] = []
    for at in asked:
        rules = table.rules[rows[at]]
        history = token_ids[rows[at], : positions[at]]
        bans += ((at, token_id) for token_id in completions(rules.bad_words, history))
        if positions[at] < rules.min_position:
            bans += ((at, token_id) for token_id in rules.stop_ids)
        biases += ((at, token_id) for token_id in rules.bias)
        values += rules.bias.values()
    if bans:
        banned_value = logits.new_full(
            (), -torch.inf
        )  # a plain number would be sent, and waited for
        logits.index_put_(_pairs(bans, logits.device), banned_value)
    if biases:
        bias = upload(np.array(values, np.float32), logits.device)
        logits[_pairs(biases, logits.device)] += bias.to(logits.dtype)


def _apply_grammars(
    logits: Tensor,
    table: SamplingTable,
    rows: np.ndarray,
    positions: np.ndarray,
    token_ids: np.ndarray,
    governed: list[int],
) -> None:
    """Bans what the grammars of the rows at `governed` do not allow. The host fills the bitmasks
    while the device computes the logits."""
    bitmasks = np.empty((len(governed), num_words(table.vocab_size)), np.int32)
    for at, bitmask in zip(governed, bitmasks, strict=True):
        grammar = table.rules[rows[at]].grammar
        assert grammar is not None
        grammar.fill_bitmask(token_ids[rows[at], : positions[at]], bitmask)
    octets = upload(bitmasks.view(np.uint8), logits.device).unsqueeze(-1)
    bits = octets >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    index = upload(np.array(governed), logits.device)
    logits[index] = logits[index].masked_fill_(banned, -torch.inf)


def completions(words: Sequence[Sequence[int]], history: np.ndarray) -> list[int]:
    """The last id of each word all of whose other ids end `history`."""
    longest = max(map(len, words), default=1)
    tail = history[max(0, len(history) - longest + 1) :].tolist()
    return [w[-1] for w in words if tail[max(0, len(tail) - len(w) + 1) :] == list(w[:-1])]


def _pairs(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    at, ids = upload(np.array(pairs), device).T
    return at, ids
