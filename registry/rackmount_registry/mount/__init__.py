"""The mount: from a configuration to a model that runs.

draft (construct, survey, cut) -> select parts -> assemble (bind, trace, fuse, allocate) -> fill
(stream, account, finish)
"""

from rackmount_registry.mount.assemble import Mounted, assemble
from rackmount_registry.mount.draft import Draft, draft
from rackmount_registry.mount.draw import fill_randomly, random_weight
from rackmount_registry.mount.fill import fill
from rackmount_registry.mount.parts import PartsChoice, select_parts

__all__ = [
    "Draft",
    "Mounted",
    "PartsChoice",
    "assemble",
    "draft",
    "fill",
    "fill_randomly",
    "random_weight",
    "select_parts",
]
