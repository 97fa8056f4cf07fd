"""The pause of Python's collector: of several, and whatever happens in it."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from rackmount.garbage import collector_paused


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()


def make_garbage() -> weakref.ref[Cycle]:
    """A cycle that was dropped, and as many objects as let a collection begin by itself."""
    seen = weakref.ref(Cycle())
    kept = [[] for _ in range(20 * gc.get_threshold()[0])]
    del kept
    return seen


def test_no_collection_begins_until_it_ends() -> None:
    assert make_garbage()() is None
    with collector_paused():
        seen = make_garbage()
        assert seen() is not None
    make_garbage()
    assert seen() is None


def test_the_collector_is_as_it_was_after_an_error_too() -> None:
    with pytest.raises(RuntimeError), collector_paused():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    with collector_paused(), collector_paused():
        pass
    assert not gc.isenabled()


def test_of_several_the_last_one_ends_it() -> None:
    """As of engines that start in threads of one process, and do not end in turn."""
    started, done = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            started.set()
            done.wait()

    thread = threading.Thread(target=other, daemon=True)
    with collector_paused():
        thread.start()
        started.wait()
    assert not gc.isenabled()
    done.set()
    thread.join()
    assert gc.isenabled()


def test_it_serves_as_a_decorator_time_and_again() -> None:
    @collector_paused()
    def running() -> bool:
        return gc.isenabled()

    assert [running(), running(), gc.isenabled()] == [False, False, True]
