"""Masks of grammars between captured steps, with the next step on its way."""

import json
import re
from collections.abc import Callable
from itertools import product
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        "qwen3",
        vocab_size=NUM_BYTE_IDS,
        head_dim=64,
        hidden_size=256,
        max_position_embeddings=256,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    byte_tokenizer().save_pretrained(folder)
    return folder


GIVEN = {"device": "cuda", "dtype": "float32", "block_size": 16, "num_kv_blocks": 128}


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 16}])
def test_answers_are_of_their_grammars_and_neighbours_do_not_notice(
    arguments: dict[str, Any], folder: Path
) -> None:
    with tiny_engine(folder, **(GIVEN | arguments)) as engine:
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


def test_graphs_give_the_answers_of_eager_steps(folder: Path) -> None:
    """Whatever else a request under a grammar asks for."""
    more: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"logit_bias": {65: 3.0, 57: -4.0}, "min_tokens": 4},
        {"bad_words": ["AB", "9"]},
    ]
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=200, grammar=spec, **given)
        for seed, (given, (spec, _)) in enumerate(product(more, CASES))
    ]
    prompts = [*NEIGHBOURS, *([65 + number] * 9 for number in range(len(params)))]
    found = []
    for eager in (True, False):
        arguments = {"enforce_eager": eager, "max_num_seqs": 16}
        with tiny_engine(folder, **(GIVEN | arguments)) as engine:
            outputs = engine.generate(prompts, [greedy(40), greedy(40), *params])
            found.append([(each.token_ids, each.outputs[0].finish_reason) for each in outputs])
            assert_idle(engine)
    assert found[0] == found[1]
