"""Which requests are let in: one rule, for those that ask and for those that only ask whether."""

from collections.abc import Iterator
from contextlib import contextmanager

from rackmount import AsyncEngine
from rackmount_server.errors import ApiError
from rackmount_server.settings import ServerSettings

RETRY_AFTER = {"Retry-After": "1"}


class Admission:
    """Counts what waits for the engine or, before that, for its token ids."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self._num_encoding, self._encoding_size = 0, 0
        self._is_closed = False

    def close(self) -> None:
        """Lets in no more: the server stops."""
        self._is_closed = True

    def check(
        self, *, num_prompts: int = 1, n: int = 1, num_tokens: int = 1, size: int = 0
    ) -> None:
        """Whether a request would be taken now.

        Args:
            num_tokens: of all its prompts, each counted `n` times; 1 where that is not known yet.
            size: bytes of text, or ids, that a thread has yet to go through.

        Raises:
            ApiError: 503 where the engine is down or the server stops, 429 where too much waits,
                400 for what would be too much where nothing waits.
        """
        engine, settings = self._engine, self._settings
        if not engine.is_alive:
            raise ApiError(503, engine.failure or "the engine is down", code="engine_unavailable")
        if self._is_closed:
            raise ApiError(503, "the server stops", code="shutting_down", headers=RETRY_AFTER)
        count, asked = num_prompts * n, f"{num_prompts} prompts with n={n}"
        if count > settings.max_queued_requests:
            rule = f"one request may have at most {settings.max_queued_requests}"
            raise ApiError(400, f"{asked} are {count} answers; {rule}", param="n")
        if count > 1 and num_tokens > settings.max_waiting_tokens:
            rule = f"those of one request may have at most {settings.max_waiting_tokens}"
            raise ApiError(400, f"{asked} are {num_tokens} prompt tokens; {rule}", param="n")
        waiting, tokens = engine.num_waiting + self._num_encoding, engine.num_waiting_tokens
        if waiting + count > settings.max_queued_requests:
            limit = f"{waiting} answers wait, of at most {settings.max_queued_requests}"
        elif self._encoding_size and self._encoding_size + size > settings.max_body_bytes:
            # A body is never smaller than its text, so that each is taken where none waits.
            limit = (
                f"{self._encoding_size} bytes of text wait, of at most {settings.max_body_bytes}"
            )
        elif tokens and tokens + num_tokens > settings.max_waiting_tokens:
            limit = f"{tokens} prompt tokens wait, of at most {settings.max_waiting_tokens}"
        else:
            return
        raise ApiError(
            429, f"overloaded: {limit}; try again later", code="overloaded", headers=RETRY_AFTER
        )

    @contextmanager
    def encoding(self, *, size: int, num_prompts: int = 1, n: int = 1) -> Iterator[None]:
        """Lets a request in, which counts as one that waits, until the block ends.

        Raises:
            ApiError: as `check`.
        """
        self.check(num_prompts=num_prompts, n=n, size=size)
        self._num_encoding += num_prompts * n
        self._encoding_size += size
        try:
            yield
        finally:
            self._num_encoding -= num_prompts * n
            self._encoding_size -= size
