"""What a server is asked for."""

import math
from dataclasses import dataclass
from ipaddress import ip_address

from rackmount_registry.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server answers; the engine's own arguments are apart.

    Raises:
        ConfigError: a drain without an end, or a key that no header carries.
    """

    model_names: tuple[str, ...]
    """By which requests may call the model; replies use the first."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    api_keys: tuple[str, ...] = ()
    """One of them opens every route; none leaves all open."""
    chat_template: str | None = None
    """In place of the tokenizer's own."""
    max_queued_requests: int = 1024
    """Most answers that wait for their first token."""
    max_waiting_tokens: int = 2**20
    """Most prompt tokens that they hold; a prompt with n=1 that finds none waiting is let in."""
    max_logprobs: int = 20
    max_body_bytes: int = 16 * 2**20
    """Of one request, and of all text that waits to be tokenized."""
    expert_metrics: bool = False
    """At /metrics a counter for every expert of every layer: thousands for a large model."""
    drain_s: float = 30.0
    """Seconds that open answers may take once the server is told to stop."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.drain_s) and self.drain_s >= 0):
            raise ConfigError(
                f"drain_seconds={self.drain_s} must be a number of seconds, 0 or more"
            )
        for number, key in enumerate(self.api_keys, 1):
            if not key.isascii():
                raise ConfigError(f"API key {number} has a character beyond ASCII; choose another")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
