"""Draws from processed logits, each row by its own temperature, top-k, top-p and min-p.

R rows, V vocabulary, W most likely tokens in order. `logits` are float32 [R, V], `top` [R, 1] the
largest of each row, `settings` float64 [R, 4] the state's `numbers`, `keys` int64 [R] those of
`row_keys`. Whichever function a row goes through, and with whatever other rows, its token is the
same: every value is computed elementwise, and the masses are integers.
"""

import torch
from torch import Tensor

from rackmount_registry.sampling.order import first_max, largest
from rackmount_registry.sampling.random import exponential_noise, row_keys
from rackmount_registry.sampling.state import Draw, SamplingState

MASS_UNIT = 2.0**40
"""Mass of the most likely token. Sums of integers are the same in any order, on any device; a token
whose mass is 0 could not win the race (see `random`)."""

_FIRST_WIDTH = 1024
"""Tokens that a top-p row ranks at first on a CPU, where ranking all of them costs most."""


def sample(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """One token for each of R rows, which depends on that row alone.

    logits [R, V], processed, of any floating dtype; they may be changed. Integers: rows [R] of the
    state, positions [R] the index that each token takes in its sequence. Gives int32 [R]; -1 where
    there is no token to give: every one is banned (-inf), or a logit is NaN or +inf.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rows = rows.long()
    token_ids = first_max(logits)
    top = logits.gather(-1, token_ids.unsqueeze(-1))
    draws = state.draws[rows]
    for kind in (Draw.WHOLE, Draw.TOP_K, Draw.TOP_P):
        drawn = (draws == kind).nonzero().squeeze(-1)
        if not len(drawn):
            continue
        at = slice(None) if len(drawn) == len(rows) else drawn  # a slice copies nothing
        settings = state.numbers[rows[at]]
        keys = row_keys(state.seeds[rows[at]], positions[at])
        x, top_x = logits[at].float(), top[at].float()
        if kind == Draw.WHOLE:
            token_ids[at] = draw_whole(x, top_x, settings, keys)
        elif kind == Draw.TOP_K:
            width = int(settings[:, 1].max())
            token_ids[at] = draw_top_k(x, top_x, settings, keys, width)
        else:
            token_ids[at] = draw_top_p(x, top_x, settings, keys)
    return token_ids.where(top.squeeze(-1).isfinite(), -1).to(torch.int32)


def draw_whole(logits: Tensor, top: Tensor, settings: Tensor, keys: Tensor) -> Tensor:
    """Rows with neither top-k nor top-p -> token ids int64 [R]."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    x = _scaled(logits, top, settings)
    return _race(x, x >= settings[:, 3:].float(), keys, ids)


def draw_top_k(logits: Tensor, top: Tensor, settings: Tensor, keys: Tensor, width: int) -> Tensor:
    """Rows whose top_k is at most `width`, with or without top-p -> token ids int64 [R]."""
    token_ids, _ = _draw_ranked(logits, top, settings, keys, width, None)
    return token_ids


def draw_top_p(logits: Tensor, top: Tensor, settings: Tensor, keys: Tensor) -> Tensor:
    """Rows with top-p alone -> token ids int64 [R]."""
    size = logits.shape[-1]
    if logits.device.type != "cpu" or size <= _FIRST_WIDTH:
        return draw_top_k(logits, top, settings, keys, size)
    total = _mass(_scaled(logits, top, settings)).sum(-1, keepdim=True)
    token_ids, complete = _draw_ranked(logits, top, settings, keys, _FIRST_WIDTH, total)
    rest = (~complete).nonzero().squeeze(-1)
    if len(rest):
        wide = draw_top_k(logits[rest], top[rest], settings[rest], keys[rest], size)
        token_ids[rest] = wide
    return token_ids


def _draw_ranked(
    logits: Tensor,
    top: Tensor,
    settings: Tensor,
    keys: Tensor,
    width: int,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draws among the `width` most likely: token ids [R], and whether these hold all of top_p [R].

    `total` [R, 1] is the mass that top_p is a part of; None: that of the top_k tokens.
    """
    top_k, top_p, min_x = settings.T[1:].unsqueeze(-1)
    top_k = top_k.long()
    ids = largest(logits, width)
    x = _scaled(logits.gather(-1, ids), top, settings)
    mass = _mass(x)
    reached = mass.cumsum(-1)
    if total is None:
        total = reached.gather(-1, top_k - 1)
    enough = (total * top_p).ceil_().to(torch.int64)
    rank = torch.arange(width, device=logits.device)
    complete = reached[:, -1] >= enough[:, 0]
    keep = (reached.sub_(mass) < enough) & (rank < top_k) & (x >= min_x.float())
    winner = _race(x, keep, keys, ids)
    return ids.gather(-1, winner.unsqueeze(-1)).squeeze(-1), complete


def _scaled(logits: Tensor, top: Tensor, settings: Tensor) -> Tensor:
    """Logits by temperature, the largest 0 at any temperature."""
    return (logits - top).div_(settings[:, :1].float())


def _mass(x: Tensor) -> Tensor:
    """Unnormalized probabilities as integers."""
    return x.exp().mul_(MASS_UNIT).to(torch.int64)


def _race(x: Tensor, keep: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """The winner's column of the exponential race among those to keep; uses `x` up."""
    x -= exponential_noise(keys, ids).log_()
    return first_max(x.masked_fill_(~keep, -torch.inf))
