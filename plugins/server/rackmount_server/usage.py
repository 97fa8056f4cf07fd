"""Tokens that a task took."""

from typing import Any

from rackmount_server.service import Piece


class Usage:
    """Counts the pieces of a task."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_completion_tokens = 0
        self._num_cached: dict[int, int] = {}

    def take(self, piece: Piece) -> None:
        choice, _, chunk = piece
        self._num_completion_tokens += len(chunk.token_ids)
        if chunk.index == 0:
            self._num_cached[choice] = chunk.num_cached_tokens

    def plain(self) -> dict[str, Any]:
        """As OpenAI shows it; of a prompt's tokens, those that its first answer found cached."""
        prompt, completion = self._num_prompt_tokens, self._num_completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }
