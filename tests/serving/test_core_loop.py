"""The engine core's loop, with all around it left out."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from rackmount.serving import core_loop


def test_what_is_loaded_is_not_searched_for_garbage_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = list[int]()

    def count(*_: Any) -> None:
        frozen.append(gc.get_freeze_count())

    core = SimpleNamespace(close=count)
    mail = SimpleNamespace(take=lambda: None)
    monkeypatch.setattr(core_loop, "Mail", lambda peer: mail)
    monkeypatch.setattr(core_loop, "_build", lambda setup, mail: core)
    monkeypatch.setattr(core_loop, "CoreLoop", lambda *_: SimpleNamespace(run=count))
    assert core_loop.serve(None)  # type: ignore[arg-type]
    stepping, closing = frozen
    assert stepping > 10_000 and closing == 0
