"""Python's collector of garbage, kept still where it finds none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
# Of the process, as the collector is.
_num_paused = 0
_enabled_before = True


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection begins by itself until the last of those that run at a time has ended.

    For stretches that make many objects and drop few, as imports, loading and captures do: the
    collector would look through all of them, again and again.
    """
    global _num_paused, _enabled_before
    with _lock:
        if not _num_paused:
            _enabled_before = gc.isenabled()
        _num_paused += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _num_paused -= 1
            if not _num_paused and _enabled_before:
                gc.enable()
