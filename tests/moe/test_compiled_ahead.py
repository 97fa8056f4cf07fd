"""What is compiled before the first step is what steps launch, by Triton's own account."""

import json
import os
import subprocess
import sys

import pytest
from tests.helpers.specializations import Found


def find(*asked: str) -> Found:
    """In a process where kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.specializations", *asked],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("asked", "kernels"),
    [
        (("experts", "tabulated"), {"vector", "product", "place", "count", "combine"}),
        (("experts", "dense"), {"vector", "product", "place", "count", "combine"}),
        (
            ("experts", "int4_groups with zeros, in another order"),
            {"vector", "product", "place", "count", "combine"},
        ),
        (("router", "qwen3"), {"gate", "route"}),
        (("router", "deepseek-v3"), {"gate", "route"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_steps_launch_what_was_compiled_ahead_and_no_more(
    asked: tuple[str, ...], kernels: set[str]
) -> None:
    """Of tokens from one to thousands, and nothing twice though there are two layers."""
    found = find(*asked)
    assert set(found["launched"]) == set(found["ahead"])
    assert len(set(found["ahead"])) == len(found["ahead"])
    names = {each.split(" ")[0].rpartition(".")[2] for each in found["launched"]}
    assert names == {f"{kernel}_kernel" for kernel in kernels}
