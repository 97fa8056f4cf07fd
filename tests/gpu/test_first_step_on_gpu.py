"""No step of an engine waits for the compiler."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import greedy, rows, tokens_of
from tests.helpers.first_step import LLAMA, QWEN3
from tests.helpers.mounting import plugins
from triton import knobs

from rackmount import Engine, SamplingParams

pytestmark = pytest.mark.gpu
LARGE = {"hidden_size": 2048, "intermediate_size": 3072, "vocab_size": 20011}
"""Large enough that products of few rows are Triton's."""


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3-moe"])
@pytest.mark.parametrize("cache", [{}, {"kv_cache_dtype": "fp8", "kv_scale": 1.0}], ids=str)
def test_all_that_an_engine_launches_was_compiled_while_weights_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    cache: dict[str, Any],
) -> None:
    """The largest steps, which measure memory, the captured ones, and others."""
    late: list[str] = []

    def note(*, fn: Any, is_manual_warmup: bool, **_: Any) -> bool:
        if not is_manual_warmup:
            late.append(fn.name)
        return False  # go on

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    (tmp_path / "config.json").write_text(json.dumps(config | LARGE))
    with Engine(
        tmp_path, manager=plugins(), load_format="dummy", backend="triton", device="cuda", **cache
    ) as engine:
        for lengths in ((1,), (1000,), (3, 700, 20), tuple(range(1, 41))):
            tokens_of(engine, rows(*lengths), greedy(3))
            for num in (None, 0, 3):
                params = SamplingParams(
                    max_tokens=3, logit_bias={7: 1.0}, logprobs=num, prompt_logprobs=num
                )
                tokens_of(engine, rows(*lengths), params)
    assert not late
