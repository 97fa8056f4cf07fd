"""How busy experts were, told by an engine: against the routers of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.checkpoints import oracle_logits, tiny_checkpoint
from tests.helpers.engines import greedy, rows, tiny_engine
from tests.helpers.executors import threads
from transformers import PreTrainedModel

from rackmount import ExpertLoad, RequestOutput

TINY = {"mlp_only_layers": [1], "num_hidden_layers": 3}
LAYERS = ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3-moe", **TINY)


def counted_by_transformers(
    model: PreTrainedModel, outputs: list[RequestOutput]
) -> Mapping[str, np.ndarray]:
    """By layer, how many tokens chose each expert. The last token of an answer is not computed, and
    in the last layer no token of a prompt but its last one."""
    counts = {name: np.zeros(8, np.int64) for name in LAYERS}
    hooks = []
    num_skipped = 0
    for name in LAYERS:
        router = model.get_submodule(name.replace("experts", "gate"))

        def count(_: Any, __: Any, found: Any, name: str = name) -> None:
            chosen = found[2][num_skipped if name == LAYERS[-1] else 0 :]
            counts[name] += np.bincount(chosen.flatten().numpy(), minlength=8)

        hooks.append(router.register_forward_hook(count))
    for output in outputs:
        num_skipped = len(output.prompt_token_ids) - 1
        oracle_logits(model, torch.tensor(output.prompt_token_ids + output.token_ids[:-1]))
    for hook in hooks:
        hook.remove()
    return counts


def assert_load(load: list[ExpertLoad], expected: Mapping[str, np.ndarray]) -> None:
    assert [each.layer for each in load] == list(expected)
    for each in load:
        assert each.tokens.tolist() == expected[each.layer].tolist()


@pytest.mark.parametrize(
    "schedule",
    [{}, {"long_prefill_token_threshold": 7, "async_scheduling": True}],
    ids=["plain", "chunked, a step ahead"],
)
def test_every_token_is_counted_once_in_every_layer_that_computes_it(
    schedule: dict[str, Any], tiny: tuple[Path, PreTrainedModel]
) -> None:
    folder, model = tiny
    engine = tiny_engine(folder, enable_prefix_caching=False, **schedule)
    before = engine.expert_load()
    outputs = engine.generate(rows(40, 5, 23), greedy(6))
    expected = counted_by_transformers(model, outputs)
    assert_load(engine.expert_load(), expected)
    assert int(expected[LAYERS[0]].sum()) == 3 * engine.stats.total_computed_tokens
    assert all(not each.tokens.any() and each.imbalance == 0 for each in before)
    outputs += engine.generate(rows(9, seed=1), greedy(2))
    assert_load(engine.expert_load(), counted_by_transformers(model, outputs))


def test_ranks_count_the_tokens_that_all_of_them_see_once(
    tiny: tuple[Path, PreTrainedModel],
) -> None:
    folder, model = tiny
    with tiny_engine(folder, manager=threads(), executor="threads", tp=2) as engine:
        outputs = engine.generate(rows(40, 5), greedy(6))
        assert_load(engine.expert_load(), counted_by_transformers(model, outputs))


def test_asking_amid_answers_loses_none(tiny: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = tiny
    alone = tiny_engine(folder).generate(rows(9, 5), greedy(12))
    engine = tiny_engine(folder, async_scheduling=True)
    found: dict[int, list[int]] = {0: [], 1: []}
    seen = [0]
    for chunk in engine.stream(rows(9, 5), greedy(12)):
        found[chunk.prompt_index] += chunk.token_ids
        seen.append(int(engine.expert_load()[0].tokens.sum()))
    assert [found[0], found[1]] == [output.token_ids for output in alone]
    assert seen == sorted(seen) and seen[-1] == 3 * engine.stats.total_computed_tokens


def test_a_model_without_experts_has_no_load(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    assert tiny_engine(folder).expert_load() == []


def test_a_broken_step_is_told_by_whoever_asks_and_the_engine_goes_on(
    tiny: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny
    engine = tiny_engine(folder, async_scheduling=True)
    expected = engine.generate(rows(9), greedy(4))[0].token_ids
    stream = engine.stream(rows(9), greedy(4))
    next(stream)
    collect = engine.core.executor.collect

    def broken() -> Any:
        collect()
        raise RuntimeError("lost")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="lost"):
        patched.setattr(engine.core.executor, "collect", broken)
        engine.expert_load()
    assert [chunk.finish_reason for chunk in stream][-1] == "error"
    assert len(engine.expert_load()) == 2
    assert engine.generate(rows(9), greedy(4))[0].token_ids == expected


def test_figures_of_a_layer() -> None:
    load = ExpertLoad("layer", np.array([0, 6, 2, 0]))
    assert (load.num_used, load.busiest, load.imbalance) == (2, 1, 3.0)
