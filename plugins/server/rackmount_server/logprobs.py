"""Log-probabilities in the shapes of OpenAI's two routes, and of prompts."""

from collections.abc import Sequence
from typing import Any

from rackmount import TokenLogprobs
from rackmount_server.tokens import TokenTexts

LEAST = -9999.0
"""What stands for -inf, which JSON cannot say."""


class CompletionLogprobs:
    """Those of one choice of /v1/completions, which count on where in the text they are."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def render(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """Of the next tokens; None for one that nothing predicts."""
        tokens = [self._texts.text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry and _number(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the one that was taken."""
        shown = {self._texts.text(each): _number(value) for each, value in entry.top.items()}
        shown.setdefault(self._texts.text(entry.token_id), _number(entry.logprob))
        return shown


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Of /v1/chat/completions."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text, data = texts.look_up(token_id)
        return {"token": text, "logprob": _number(logprob), "bytes": data}

    return {
        "content": [
            one(entry.token_id, entry.logprob)
            | {"top_logprobs": [one(*item) for item in entry.top.items()]}
            for entry in entries
        ]
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """For each prompt token, by token id, itself and the most likely ones, as vLLM shows them."""

    def one(entry: TokenLogprobs) -> dict[str, Any]:
        ranked = {each: (value, rank) for rank, (each, value) in enumerate(entry.top.items(), 1)}
        ranked[entry.token_id] = entry.logprob, entry.rank
        return {
            str(token_id): {
                "logprob": _number(value),
                "rank": rank,
                "decoded_token": texts.text(token_id),
            }
            for token_id, (value, rank) in ranked.items()
        }

    return [None if entry is None else one(entry) for entry in entries]


def _number(logprob: float) -> float:
    return max(logprob, LEAST)
