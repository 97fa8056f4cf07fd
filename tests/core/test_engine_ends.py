"""How answers end: stop tokens, stop strings, lengths, errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.checkpoints import edit_config, edit_tensors, tiny_checkpoint
from tests.helpers.engines import (
    END_OF_TURN,
    EOS,
    assert_idle,
    chain_checkpoint,
    greedy,
    rows,
    spell,
    tiny_engine,
    tokens_of,
)

from rackmount import Engine, SamplingParams

ENDING = greedy(20, ignore_eos=False)


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """ "A" is answered by "BCDE...", "0" by "123" and the end, "!" by the end."""
    chain = spell("123", start="0", end=EOS) | {ord("!"): EOS, EOS: ord("y")}
    return tiny_engine(chain_checkpoint(tmp_path_factory.mktemp("chain"), chain))


def test_an_end_of_sequence_ends_the_answer_and_is_no_part_of_its_text(alphabet: Engine) -> None:
    (output,) = alphabet.generate("0", ENDING)
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids) == ("123", [*b"123", EOS])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", EOS)


def test_a_first_token_that_ends_the_answer_leaves_it_empty_and_the_engine_alive(
    alphabet: Engine,
) -> None:
    outputs = alphabet.generate(["!", "0"], ENDING)
    assert [output.text for output in outputs] == ["", "123"]
    (answer,) = outputs[0].outputs
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([EOS], "stop", EOS)
    chunks = list(alphabet.stream("!", ENDING))
    assert [(chunk.text, chunk.finish_reason) for chunk in chunks] == [("", "stop")]
    assert alphabet.generate("0", ENDING)[0].text == "123"
    assert_idle(alphabet)


def test_the_end_of_sequence_may_be_ignored(alphabet: Engine) -> None:
    (output,) = alphabet.generate("0", greedy(6))
    assert output.token_ids == [*b"123", EOS, *b"yz"]
    assert output.text == "123yz"
    assert alphabet.generate("0", greedy(6, skip_special_tokens=False))[0].text == "123<eos>yz"


def test_every_file_of_the_model_may_name_ends_of_sequence(tmp_path: Path) -> None:
    folder = chain_checkpoint(tmp_path)  # the tokenizer names 257
    edit_config(folder, lambda c: c.update(eos_token_id=[ord("J"), 1000, -1]))
    generation = {"eos_token_id": [ord("L"), END_OF_TURN]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    engine = tiny_engine(folder)
    assert engine.eos_token_ids == {ord("J"), ord("L"), EOS, END_OF_TURN}
    outputs = engine.generate(["H", "K"], ENDING)
    assert [output.text for output in outputs] == ["I", ""]
    assert [output.outputs[0].stop_reason for output in outputs] == [ord("J"), ord("L")]


def test_a_stop_token_of_the_request_ends_it_also_where_ends_of_sequence_are_ignored(
    alphabet: Engine,
) -> None:
    (output,) = alphabet.generate("0", greedy(9, stop_token_ids=[ord("y")]))
    (answer,) = output.outputs
    assert (answer.text, answer.stop_reason) == ("123", ord("y"))
    kept = greedy(9, stop_token_ids=[ord("y")], include_stop_str_in_output=True)
    assert alphabet.generate("0", kept)[0].text == "123y"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("DEF", "BC", "DEF"),
        (["XYZ", "G", "FG"], "BCDE", "FG"),
        ("B", "", "B"),
        ("BCD", "", "BCD"),
        ("DEX", "BCDEFGHI", None),
    ],
    ids=str,
)
def test_a_stop_string_ends_the_answer_before_it(
    alphabet: Engine, stop: str | list[str], text: str, reason: str | None
) -> None:
    (output,) = alphabet.generate("A", greedy(8, stop=stop))
    (answer,) = output.outputs
    assert (answer.text, answer.stop_reason) == (text, reason)
    assert answer.finish_reason == ("length" if reason is None else "stop")
    assert_idle(alphabet)


def test_a_stop_string_may_stay_in_the_text(alphabet: Engine) -> None:
    params = greedy(8, stop=["EF"], include_stop_str_in_output=True)
    assert alphabet.generate("A", params)[0].text == "BCDEF"


def test_a_stop_string_that_the_last_token_completes_counts_as_stop(alphabet: Engine) -> None:
    (answer,) = alphabet.generate("A", greedy(3, stop="CD"))[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("B", "stop", "CD")


def test_min_tokens_holds_back_every_kind_of_end(alphabet: Engine) -> None:
    early = greedy(6, ignore_eos=False, min_tokens=5)
    (answer,) = alphabet.generate("!", early)[0].outputs
    assert EOS not in answer.token_ids[:5]
    assert len(answer.token_ids) >= 5
    (answer,) = alphabet.generate("A", greedy(9, stop_token_ids=[ord("C")], min_tokens=4))[
        0
    ].outputs
    assert ord("C") not in answer.token_ids[:4]
    (answer,) = alphabet.generate("A", greedy(9, stop=["C", "G"], min_tokens=4))[0].outputs
    assert (answer.text, answer.stop_reason) == ("BCDEF", "G")


@pytest.mark.parametrize("num", [1, 2, 7])
def test_max_tokens_is_exact(alphabet: Engine, num: int) -> None:
    (answer,) = alphabet.generate("A", greedy(num))[0].outputs
    assert (len(answer.token_ids), answer.finish_reason) == (num, "length")


def test_a_stop_token_as_the_last_one_counts_as_stop(alphabet: Engine) -> None:
    (answer,) = alphabet.generate("0", greedy(4, ignore_eos=False))[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", EOS)


def test_an_answer_ends_at_max_model_len(tmp_path: Path) -> None:
    engine = tiny_engine(tiny_checkpoint(tmp_path, "llama")[0], max_model_len=20)
    for prompt, params in zip(rows(19, 12), (greedy(None), greedy(100)), strict=True):
        (answer,) = engine.generate(prompt, params)[0].outputs
        assert (len(prompt) + len(answer.token_ids), answer.finish_reason) == (20, "length")
    with pytest.raises(ValueError, match=r"20 tokens is too long: max_model_len=20.* at most 19"):
        engine.generate(rows(20)[0], greedy())
    assert_idle(engine)


def test_an_answer_ends_where_the_pool_does_and_a_prompt_beyond_it_is_refused(
    tmp_path: Path,
) -> None:
    engine = tiny_engine(tiny_checkpoint(tmp_path, "llama")[0], num_kv_blocks=5)
    outputs = engine.generate(rows(18, 21, 5), greedy(30))
    assert [len(output.completions and output.token_ids) for output in outputs] == [3, 0, 16]
    assert str(outputs[1].error).endswith(
        "a prompt of 21 tokens can never fit the KV cache; at most 20 do, 5 blocks of 4"
    )
    assert [outputs[i].outputs[0].finish_reason for i in (0, 2)] == ["length", "length"]
    assert_idle(engine)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model whose token 7 makes NaN of everything that sees it."""
    folder, _ = tiny_checkpoint(tmp_path_factory.mktemp("nan"), "llama", tie_word_embeddings=False)
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors[name][7].fill_(torch.nan))
    return tiny_engine(folder, num_kv_blocks=30)


@pytest.mark.parametrize(
    "params",
    [
        greedy(10),
        SamplingParams(seed=1, max_tokens=10, ignore_eos=True, logprobs=2),
        SamplingParams(seed=1, max_tokens=10, top_p=0.8, ignore_eos=True, frequency_penalty=1.0),
        SamplingParams(seed=1, max_tokens=10, top_k=3, ignore_eos=True, prompt_logprobs=1),
    ],
    ids=["greedy", "whole", "top_p", "top_k"],
)
def test_logits_of_nan_end_their_request_alone(poisoned: Engine, params: SamplingParams) -> None:
    good = [[i for i in row if i != 7] for row in rows(9, 14, 6)]
    allowed = [i for i in range(97) if i != 7]
    params = replace(params, allowed_token_ids=allowed)
    expected = tokens_of(poisoned, good, params)
    poisoned.reset_prefix_cache()
    for where in (1, 0, 3):
        mixed = [*good[:where], [1, 2, 7, 3, 4, 5], *good[where:]]
        longer = replace(params, max_tokens=40)  # outlives the others, unless it ends
        each = [*[params] * where, longer, *[params] * (3 - where)]
        outputs = poisoned.generate(mixed, each)
        (failed,) = outputs.pop(where).outputs
        assert (failed.finish_reason, failed.token_ids, failed.text) == ("error", [], "")
        assert [output.token_ids for output in outputs] == expected
        assert_idle(poisoned)
    # Blocks that hold NaN are used again.
    for _ in range(4):
        assert tokens_of(poisoned, good, params) == expected
        poisoned.reset_prefix_cache()


def test_logits_of_nan_after_some_tokens_leave_those(poisoned: Engine) -> None:
    outputs = poisoned.generate([[1, 2], [1, 2]], [greedy(5, logit_bias={7: 100.0}), greedy(5)])
    (failed,), (good,) = (output.outputs for output in outputs)
    assert (failed.token_ids, failed.finish_reason) == ([7], "error")
    assert (len(good.token_ids), good.finish_reason) == (5, "length")


def test_a_stream_tells_of_the_error(poisoned: Engine) -> None:
    chunks = list(poisoned.stream([[7], [8]], greedy(2)))
    assert [c.finish_reason for c in chunks if c.prompt_index == 0] == ["error"]
    assert [c.finish_reason for c in chunks if c.prompt_index == 1] == [None, "length"]


def test_a_request_whose_every_token_is_banned_ends_as_an_error(alphabet: Engine) -> None:
    banned = greedy(5, allowed_token_ids=[ord("B")], bad_words=["B"])
    outputs = alphabet.generate(["A", "A"], [banned, greedy(3)])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].text == "BCD"
    assert_idle(alphabet)
