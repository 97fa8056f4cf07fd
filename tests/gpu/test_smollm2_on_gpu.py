"""A real model on a GPU: every attention backend that is here answers as the reference does."""

from typing import Any

import pytest
from tests.helpers.mounting import plugins

from rackmount import Completion, Engine, SamplingParams

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
DTYPES = {"triton": "float32", "flash-attn": "bfloat16", "flashinfer": "bfloat16"}
"""The widest that each takes with keys as wide."""


TIES = {"float32": 0.0, "bfloat16": 0.125}
"""How far apart, in natural logarithms, two tokens are that rounding may swap: logits from 16 to 32
lie so far apart in bfloat16."""


def answers(backend: str, dtype: str, **arguments: Any) -> list[Completion]:
    logprobs = arguments.pop("logprobs", None)
    with Engine(
        "smollm2-135m",
        manager=plugins(),
        device="cuda",
        backend=backend,
        dtype=dtype,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 30,
        **arguments,
    ) as engine:
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=logprobs)
        return [each.outputs[0] for each in engine.generate(CHATS, params)]


@pytest.mark.parametrize(
    "backend", [name for name in DTYPES if not plugins().find("attention_backend", name).missing()]
)
def test_greedy_text_is_that_of_the_reference(backend: str) -> None:
    """Until the reference itself has two tokens that are equal but for rounding."""
    dtype = DTYPES[backend]
    ours, expected = answers(backend, dtype), answers("torch", dtype, op_set="torch", logprobs=5)
    for mine, theirs in zip(ours, expected, strict=True):
        assert theirs.logprobs is not None
        for ours_id, entry in zip(mine.token_ids, theirs.logprobs, strict=False):
            if ours_id != entry.token_id:
                assert entry.logprob - entry.top[ours_id] <= TIES[dtype], (mine.text, theirs.text)
                break
        else:
            assert mine.text == theirs.text
    assert "Paris" in ours[0].text
