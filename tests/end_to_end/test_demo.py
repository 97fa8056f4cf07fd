"""What `make demo` runs once it has set itself up."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_answers_a_question_and_says_how_fast(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = re.search(r"(?m)^demo:.*\n\t\$\(BIN\)/(rackmount run .*)$", makefile)
    assert found is not None
    program, *arguments = shlex.split(found[1])
    done = subprocess.run(
        [Path(sys.executable).parent / program, *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert re.search(r"\d tokens at \d+(\.\d+)? tokens/s", done.stderr), done.stderr
