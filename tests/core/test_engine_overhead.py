"""The script that measures what the host does for a step: its parts are still where it looks."""

import json
from pathlib import Path

import pytest
from benchmarks.engine_overhead import CONFIG, measure


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_a_step_are_measured(tmp_path: Path, stream: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    parts = measure(tmp_path, 2, 12, None, stream)
    assert min(parts.values()) > 0
    assert parts["schedule"] + parts["update"] < parts["a step"]
