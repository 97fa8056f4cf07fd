"""Which executor runs the ranks."""

from collections.abc import Set

from rackmount_registry.descriptors import Executor
from rackmount_registry.errors import SelectionError
from rackmount_registry.offers import Offer
from rackmount_registry.plugins import PluginManager
from rackmount_registry.selection import first_in_order


def choose_executor(
    manager: PluginManager, name: str, num_ranks: int, opted_in: Set[str]
) -> Offer[Executor]:
    """The executor called `name`; for "auto" the first in order that takes so many ranks.

    Raises:
        PluginError: an unknown name.
        SelectionError: it, or every one, takes fewer ranks.
    """
    offers = manager.offers(Executor)
    fitting = [offer for offer in offers if num_ranks <= (offer.descriptor.max_ranks or num_ranks)]
    if name == "auto":
        if (first := first_in_order(fitting, opted_in)) is not None:
            return first
    else:
        wanted = manager.find(Executor, name)
        if wanted in fitting:
            return wanted
    legal = ", ".join(sorted(offer.name for offer in fitting)) or "none that is mounted"
    raise SelectionError(f"executor={name!r} takes fewer than {num_ranks} ranks; choose {legal}")
