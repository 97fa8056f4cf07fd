"""Masks of grammars between captured steps, with the next step on its way."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import (
    BOS,
    EOS,
    NUM_BYTE_IDS,
    assert_idle,
    byte_tokenizer,
    greedy,
    tiny_engine,
    tokens_of,
)

from rackmount import GrammarSpec, SamplingParams

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["kind", "size"],
}
CASES: list[tuple[GrammarSpec, Callable[[str], Any]]] = [
    (GrammarSpec(json_schema=json.dumps(SCHEMA)), json.loads),
    (GrammarSpec(regex="[A-F]{2,6}-[0-9]{2}"), re.compile("[A-F]{2,6}-[0-9]{2}").fullmatch),
    (GrammarSpec(choice=("yes", "n\u00e9")), ("yes", "n\u00e9").__contains__),
]
NEIGHBOURS = [[1, 2, 3], [70, 71]]


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 16}])
def test_answers_are_of_their_grammars_and_neighbours_do_not_notice(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint(
        tmp_path,
        "qwen3",
        vocab_size=NUM_BYTE_IDS,
        head_dim=64,
        hidden_size=256,
        max_position_embeddings=256,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    byte_tokenizer().save_pretrained(folder)
    given = {"device": "cuda", "dtype": "float32", "block_size": 16, "num_kv_blocks": 128}
    with tiny_engine(folder, **(given | arguments)) as engine:
        alone = [tokens_of(engine, [each], greedy(40))[0] for each in NEIGHBOURS]
        for seed in range(8):
            params = [
                SamplingParams(temperature=1.5, seed=seed, max_tokens=200, grammar=spec)
                for spec, _ in CASES
            ]
            prompts = [*NEIGHBOURS, *([65 + seed] * 30 for _ in CASES)]
            outputs = engine.generate(prompts, [greedy(40), greedy(40), *params])
            assert [output.token_ids for output in outputs[:2]] == alone
            for output, (_, check) in zip(outputs[2:], CASES, strict=True):
                assert output.outputs[0].finish_reason == "stop"
                assert check(output.text), output.text
        assert_idle(engine)
