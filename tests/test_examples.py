"""Every example runs as its first lines say, and prints what it is for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

SAYS = {
    "generate.py": r"^' Paris.*'\n'.*(Red|red).*'\n$",
    "stream_chat.py": (
        r"(?s)^> What is the capital of France\?\n"
        r"The capital of France is Paris\.\n"
        r"> And of Italy\?\n.+Rome.*\n"
        r"prefix cache: [1-9]\d* tokens of prompts were already there\n$"
    ),
    "one_file_plugin.py": r"^requested\n' Paris.*'\n$",
}


def test_every_example_is_run() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_the_example_prints_what_it_is_for(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(SAYS[name], done.stdout), done.stdout
    assert done.stderr == ""
