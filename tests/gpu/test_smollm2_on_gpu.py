"""A real model on a GPU: every attention backend that is here answers as the reference does."""

from typing import Any

import pytest
from tests.helpers.mounting import plugins

from rackmount import Engine, SamplingParams

pytestmark = pytest.mark.gpu

CHATS = [
    [{"role": "user", "content": text}]
    for text in (
        "What is the capital of France?",
        "Count from one to ten.",
        "Name the seven days of the week.",
        "Write one sentence about the sea.",
    )
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
DTYPES = {"triton": "float32", "flash-attn": "bfloat16", "flashinfer": "bfloat16"}
"""The widest that each takes with keys as wide."""


def answers(backend: str, dtype: str, **arguments: Any) -> list[str]:
    with Engine(
        "smollm2-135m",
        manager=plugins(),
        device="cuda",
        backend=backend,
        dtype=dtype,
        max_model_len=512,
        gpu_memory_utilization=0.3,
        **arguments,
    ) as engine:
        return [each.text for each in engine.generate(CHATS, GREEDY)]


@pytest.mark.parametrize(
    "backend", [name for name in DTYPES if not plugins().find("attention_backend", name).missing()]
)
def test_greedy_text_is_that_of_the_reference(backend: str) -> None:
    dtype = DTYPES[backend]
    ours, expected = answers(backend, dtype), answers("torch", dtype, op_set="torch")
    assert ours == expected
    assert "Paris" in ours[0]
