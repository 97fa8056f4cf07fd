"""A request that loses its blocks amid its answer goes on as if nothing had happened."""

from pathlib import Path

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import assert_idle, chain_checkpoint, greedy, rows, tiny_engine

from rackmount import Engine, SamplingParams
from rackmount.scheduling.plan import StepPlan

VICTIM = rows(40)[0]
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": True}

STATES: dict[str, SamplingParams] = {
    "greedy": greedy(20),
    "sampled": SamplingParams(**SAMPLED),
    "repetition penalty": SamplingParams(repetition_penalty=1.5, **SAMPLED),
    "frequency penalty": greedy(20, frequency_penalty=2.0),
    "presence penalty": greedy(20, presence_penalty=2.0),
    "negative presence penalty": greedy(20, presence_penalty=-2.0),
    "stop tokens from the 8th on": greedy(20, stop_token_ids=list(range(60)), min_tokens=8),
    "several answers": SamplingParams(n=2, **SAMPLED),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")[0]


def returns_amid_its_answer(engine: Engine, num_prompt_tokens: int) -> list[int]:
    """Filled in as the engine runs: with how many outputs requests of that prompt came back."""
    submit, returns = engine.core.executor.submit, []

    def recorded(plan: StepPlan) -> None:
        for entry in plan.admitted:
            num_output = entry.token_ids.size - entry.num_prompt_tokens
            if num_output and entry.num_prompt_tokens == num_prompt_tokens:
                returns.append(num_output)
        submit(plan)

    engine.core.executor.submit = recorded  # type: ignore[method-assign]
    return returns


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("state", STATES)
def test_what_sampling_remembers_survives_a_preemption(
    state: str, caching: bool, folder: Path
) -> None:
    params = STATES[state]
    (alone,) = tiny_engine(folder).generate(VICTIM, params)
    blocks = {"num_kv_blocks": 16 if params.n == 1 else 27, "enable_prefix_caching": caching}
    engine = tiny_engine(folder, **blocks)
    returns = returns_amid_its_answer(engine, len(VICTIM))
    prompts = [*rows(4, 4, seed=3), VICTIM]  # the last one is preempted first
    *_, output = engine.generate(prompts, [greedy(20), greedy(20), params])
    assert any(2 < num < 7 for num in returns)
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in alone.outputs]
    assert_idle(engine)


def test_text_and_stop_strings_survive_a_preemption(tmp_path: Path) -> None:
    engine = tiny_engine(chain_checkpoint(tmp_path), num_kv_blocks=6)
    returns = returns_amid_its_answer(engine, 5)
    params = [greedy(12), greedy(12, stop="JKL")]
    streamed = ["", ""]
    for chunk in engine.stream(["xxxxA", "xxxxB"], params):
        streamed[chunk.prompt_index] += chunk.text
    assert returns
    assert streamed == ["BCDEFGHIJKLM", "CDEFGHI"]
    assert_idle(engine)
