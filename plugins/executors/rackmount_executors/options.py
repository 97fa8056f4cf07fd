"""Options of the executors, apart from them so that reading them imports no torch."""

from dataclasses import dataclass

from rackmount_registry.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MultiprocessOptions:
    start_timeout_s: float = 120.0
    """Until every rank has met the others; loading is not counted."""
    silence_timeout_s: float = 8.0
    """A rank that has met the others gives a sign of life each half second; one that is silent for
    so long is taken for stopped."""
    spin_s: float | None = None
    """How long a rank looks for the next step before it sleeps; None: a little on GPUs, 0 on
    CPUs."""

    def __post_init__(self) -> None:
        for name, least in (("start_timeout_s", 0.1), ("silence_timeout_s", 2.0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.spin_s is not None and not 0 <= self.spin_s <= 1:
            raise ConfigError(f"spin_s={self.spin_s} must be from 0 to 1")
