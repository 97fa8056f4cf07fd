"""Options of this distribution's parts, apart from them so that reading them imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from rackmount_moe.triton_experts.table import Table


@dataclass(frozen=True, kw_only=True)
class TritonExpertsOptions:
    """Of expert kernel "triton".

    Raises:
        ConfigError: `tuned` holds no table.
    """

    tuned: str | None = None
    """File that `rackmount bench kernels --tune` wrote on this GPU: its tilings go before those
    that come along. Layers of a shape that it lacks are refused."""

    def __post_init__(self) -> None:
        self.table()

    def table(self) -> Table | None:
        """What `tuned` holds."""
        return None if self.tuned is None else Table.read(Path(self.tuned).expanduser())
