"""What `generate` takes and gives back."""

import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import (
    assert_idle,
    chain_checkpoint,
    greedy,
    rows,
    tiny_engine,
    tokens_of,
)

from rackmount import Completion, Engine, SamplingParams
from rackmount.scheduling.plan import StepPlan
from rackmount_registry.errors import CheckpointError, ConfigError

CHAT = [{"role": "user", "content": "hello"}]
SAMPLED = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Answers with the alphabet."""
    return tiny_engine(chain_checkpoint(tmp_path_factory.mktemp("chain")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")[0]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return tiny_engine(folder)


@pytest.mark.parametrize("prompt", ["xA", [120, 65], (120, 65), CHAT], ids=str)
def test_a_prompt_is_text_or_token_ids_or_a_chat(chain: Engine, prompt: object) -> None:
    (output,) = chain.generate(prompt, greedy(4))  # type: ignore[arg-type]
    assert output.text == "BCDE"
    assert output.token_ids == [*b"BCDE"]
    assert output.outputs == [
        Completion(index=0, text="BCDE", token_ids=[*b"BCDE"], finish_reason="length")
    ]
    assert output.prompt_token_ids == [*(b"u:helloA" if prompt is CHAT else b"xA")]
    assert (output.prompt_logprobs, output.error) == (None, None)
    assert_idle(chain)


def test_a_batch_mixes_all_kinds_of_prompts_and_keeps_their_order(chain: Engine) -> None:
    outputs = chain.generate(["C", [65], CHAT, "E"], greedy(3))
    assert [output.text for output in outputs] == ["DEF", "BCD", "BCD", "FGH"]


def test_a_batch_of_one_is_a_batch(chain: Engine) -> None:
    (output,) = chain.generate([""], greedy(3))
    assert isinstance(output.error, ValueError)


def test_each_prompt_may_have_params_of_its_own(chain: Engine) -> None:
    outputs = chain.generate(["A", "A"], [greedy(2), greedy(3)])
    assert [output.text for output in outputs] == ["BC", "BCD"]


def test_the_chat_template_gets_its_arguments(chain: Engine) -> None:
    (output,) = chain.generate(CHAT, greedy(2), chat_template_kwargs={"cue": "M"})
    assert output.text == "NO"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "no token"),
        ([1, 260], "token id 260 at index 1 .* legal ids are 0 to 259"),
        ([-1], "token id -1 at index 0"),
        ([1.5], "type float"),
        ([1] * 256, "256 tokens is too long: max_model_len=256.* at most 255"),
        ("\ud800", "surrogates not allowed"),
        ([{"role": "user"}], "'content'"),
    ],
    ids=repr,
)
def test_a_bad_prompt_is_refused_alone_and_the_others_are_served(
    chain: Engine, bad: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chain.generate(bad, greedy(3))  # type: ignore[arg-type]
    good, refused, last = chain.generate(["A", bad, "B"], greedy(3))  # type: ignore[list-item]
    assert (good.text, last.text) == ("BCD", "CDE")
    assert refused.prompt_token_ids == []
    assert refused.completions == []
    for read in (lambda: refused.text, lambda: refused.token_ids, lambda: refused.outputs):
        with pytest.raises(ValueError, match=message):
            read()
    assert_idle(chain)


def test_an_empty_batch_has_no_answers_and_an_empty_prompt_is_refused(chain: Engine) -> None:
    assert chain.generate([], greedy(3)) == [] == list(chain.stream([], greedy(3)))
    good, refused = chain.generate(["A", []], greedy(3))
    assert good.text == "BCD" and "no token" in str(refused.error)


def test_params_that_the_model_refuses_are_refused_for_their_prompt_alone(chain: Engine) -> None:
    params = [greedy(2), greedy(2, logit_bias={260: 1.0}), greedy(2, stop_token_ids=[260])]
    outputs = chain.generate(["A", "A", "A"], params)
    assert outputs[0].text == "BC"
    for output in outputs[1:]:
        assert isinstance(output.error, ConfigError)
        assert "id 260" in str(output.error)
        assert "0 to 259" in str(output.error)


def test_an_id_of_the_vocabulary_that_the_tokenizer_lacks_has_no_text(tmp_path: Path) -> None:
    engine = tiny_engine(chain_checkpoint(tmp_path, {65: 259, 259: 66}))
    outputs = engine.generate(["A", [259]], greedy(3))
    assert [output.token_ids for output in outputs] == [[259, 66, 67], [66, 67, 68]]
    assert [output.text for output in outputs] == ["BC", "BCD"]


@pytest.mark.parametrize("params", [{"temperature": 0}, [greedy(), None], 0.5, "greedy"], ids=str)
def test_params_of_another_type_are_refused(chain: Engine, params: object) -> None:
    with pytest.raises(TypeError, match="SamplingParams"):
        chain.generate(["A", "B"], params)  # type: ignore[arg-type]
    assert_idle(chain)


def test_as_many_params_as_prompts_are_needed(chain: Engine) -> None:
    with pytest.raises(ConfigError, match="2 sampling params for 3 prompts"):
        chain.generate(["A", "B", "C"], [greedy(), greedy()])
    assert_idle(chain)


@pytest.mark.parametrize("priority", [None, "high", 0.5, float("nan"), True])
def test_a_priority_is_an_integer(chain: Engine, priority: object) -> None:
    with pytest.raises(TypeError, match=r"priority=.* must be an integer"):
        chain.generate("A", greedy(), priority=priority)  # type: ignore[arg-type]
    assert_idle(chain)


@pytest.mark.parametrize(("salt", "error"), [(7, TypeError), ("\ud800", ValueError)])
def test_a_salt_is_text(chain: Engine, salt: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        chain.generate("A", greedy(), cache_salt=salt)  # type: ignore[arg-type]
    assert_idle(chain)


def test_text_needs_a_tokenizer_and_ids_do_not(engine: Engine) -> None:
    assert engine.tokenizer is None
    (output,) = engine.generate([1, 2, 3], greedy(4))
    assert (output.text, len(output.token_ids)) == ("", 4)
    for prompt, params in [("text", greedy()), (CHAT, greedy())]:
        with pytest.raises(ValueError, match="no tokenizer"):
            engine.generate(prompt, params)
    for params in (greedy(stop="x"), greedy(bad_words=["x"])):
        with pytest.raises(ConfigError, match="need a tokenizer"):
            engine.generate([1, 2], params)
    assert_idle(engine)


def test_without_detokenizing_there_is_no_text(chain: Engine) -> None:
    (output,) = chain.generate("A", greedy(3, detokenize=False))
    assert (output.text, output.token_ids) == ("", [*b"BCD"])


def test_several_answers_differ_and_the_first_is_that_of_n_1(engine: Engine) -> None:
    (prompt,) = rows(9)
    (one,) = engine.generate(prompt, SamplingParams(seed=5, **SAMPLED))
    (three,) = engine.generate(prompt, SamplingParams(seed=5, n=3, **SAMPLED))
    answers = [answer.token_ids for answer in three.outputs]
    assert [answer.index for answer in three.outputs] == [0, 1, 2]
    assert answers[0] == one.token_ids == three.token_ids
    assert len({tuple(answer) for answer in answers}) == 3
    (next_seed,) = engine.generate(prompt, SamplingParams(seed=6, **SAMPLED))
    assert next_seed.token_ids not in answers  # siblings do not borrow other requests' seeds


def test_greedy_answers_are_alike(engine: Engine) -> None:
    (output,) = engine.generate(rows(9)[0], greedy(6, n=2))
    assert output.outputs[0].token_ids == output.outputs[1].token_ids


def test_a_seed_gives_the_same_tokens_whatever_else_runs(folder: Path, engine: Engine) -> None:
    prompts = rows(9, 5, 17, 3)
    params = [
        SamplingParams(seed=1, **SAMPLED),
        SamplingParams(seed=2, top_k=5, repetition_penalty=1.3, **SAMPLED),
        SamplingParams(seed=3, top_p=0.7, frequency_penalty=0.5, **SAMPLED),
        SamplingParams(seed=3, min_p=0.05, presence_penalty=-0.5, **SAMPLED),
    ]
    together = tokens_of(engine, prompts, params)
    crowded = tiny_engine(folder, max_num_seqs=2, max_num_batched_tokens=5)
    assert tokens_of(crowded, prompts[::-1], params[::-1])[::-1] == together
    for prompt, wanted, expected in zip(prompts, params, together, strict=True):
        assert engine.generate(prompt, wanted)[0].token_ids == expected


def test_without_a_seed_every_request_draws_its_own_and_the_engine_s_seed_decides(
    folder: Path,
) -> None:
    (prompt,) = rows(9)
    first, again, other = (tiny_engine(folder, seed=seed) for seed in (1, 1, 2))
    drawn = tokens_of(first, [prompt] * 2, SamplingParams(**SAMPLED))
    assert drawn[0] != drawn[1]
    assert tokens_of(again, [prompt] * 2, SamplingParams(**SAMPLED)) == drawn
    assert tokens_of(other, [prompt] * 2, SamplingParams(**SAMPLED)) != drawn


def test_edge_values_mean_what_the_table_says(engine: Engine) -> None:
    (prompt,) = rows(9)

    def tokens(**given: Any) -> list[int]:
        params = SamplingParams(**({"seed": 3} | SAMPLED | given))
        return engine.generate(prompt, params)[0].token_ids

    greedily = tokens(temperature=0)
    for given in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"temperature": 1e-6}):
        assert tokens(**given) == greedily
    freely = tokens()
    assert freely != greedily
    for given in ({"top_k": -1}, {"top_k": 97}, {"top_k": 10**9}, {"top_p": 1}, {"min_p": 0}):
        assert tokens(**given) == freely


@pytest.mark.parametrize(("policy", "order"), [("priority", [1, 2, 0]), ("fcfs", [0, 1, 2])])
def test_lower_priorities_go_first_under_that_policy(
    policy: str, order: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(folder, max_num_seqs=1, scheduling_policy=policy)
    submit, admitted = engine.core.executor.submit, []

    def recorded(plan: StepPlan) -> None:
        admitted.extend(entry.num_prompt_tokens for entry in plan.admitted)
        submit(plan)

    monkeypatch.setattr(engine.core.executor, "submit", recorded)
    prompts = rows(5, 6, 7)
    streams = [
        engine.stream(prompt, greedy(4), priority=priority)
        for prompt, priority in zip(prompts, (3, -1, 2), strict=True)
    ]
    for stream in streams:
        assert len(list(stream)) == 4
    assert admitted == [len(prompts[index]) for index in order]
    assert_idle(engine)


@pytest.mark.parametrize("num", [1, 12, 20, 33])
def test_every_batch_size_up_to_the_limit_runs(folder: Path, num: int) -> None:
    engine = tiny_engine(folder, max_num_seqs=num, num_kv_blocks=4 * num)
    prompts = rows(*(1 + i % 7 for i in range(num)))
    outputs = tokens_of(engine, prompts, greedy(4))
    assert engine.stats.total_preemptions == 0
    for prompt, expected in list(zip(prompts, outputs, strict=True))[:: max(1, num // 4)]:
        assert engine.generate(prompt, greedy(4))[0].token_ids == expected
    assert_idle(engine)


def test_the_default_params_are_what_the_model_recommends(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": null}')
    assert tiny_engine(tmp_path).default_sampling_params == SamplingParams(
        temperature=0.6, top_k=20
    )
    file.write_text('{"do_sample": false, "temperature": 0.6}')
    assert tiny_engine(tmp_path).default_sampling_params.greedy
    for wrong, rule in (
        ('{"temperature": "x"}', "temperature='x' is a str"),
        ('{"top_p": 2}', "top_p=2"),
    ):
        file.write_text(wrong)
        with pytest.raises(CheckpointError, match=f"generation_config.json: {rule}"):
            tiny_engine(tmp_path)
    file.unlink()
    assert tiny_engine(tmp_path).default_sampling_params == SamplingParams()


def test_a_closed_engine_gives_its_memory_back(folder: Path) -> None:
    with tiny_engine(folder) as engine:
        stream = engine.stream(rows(5)[0], greedy(20))
        next(stream)
        weights = [weakref.ref(each.tensor) for each in engine.rack.draft.storages()]
        caches = [
            weakref.ref(cache)
            for cache in engine.core.executor._program._worker._runner.step.caches
        ]
    assert [reference() for reference in weights + caches] == [None] * (len(weights) + 2)
    assert [chunk.finish_reason for chunk in stream] == ["abort"]
    engine.close()
