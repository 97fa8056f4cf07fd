"""What goes wrong between the front end and the engine core."""

from rackmount_registry import errors
from rackmount_registry.errors import RackmountError
from rackmount_registry.executor import RankError


class EngineDead(RackmountError):  # noqa: N818  # a state, as its name says
    """The engine core's process has ended, and with it every request."""


def rebuilt(name: str, text: str, traceback: str, rank: int | None) -> RackmountError:
    """An error that another process raised: of its own class where that is one of rackmount's.

    The traceback is a note.
    """
    known = getattr(errors, name, None)
    error: RackmountError
    if rank is not None:
        error = RankError(rank, text)
    elif isinstance(known, type) and issubclass(known, RackmountError):
        error = known(text)
    else:
        error = EngineDead(f"the engine core failed: {name}: {text}")
    error.add_note(f"In the engine core:\n{traceback.rstrip()}")
    return error
