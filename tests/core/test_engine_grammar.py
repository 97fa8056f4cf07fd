"""Answers under grammars are texts of them, however they are scheduled, and trouble nobody else."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import (
    END_OF_TURN,
    EOS,
    assert_idle,
    chain_checkpoint,
    greedy,
    tiny_engine,
    tokens_of,
)
from tests.helpers.mounting import plugins

from rackmount import Engine, GrammarSpec, SamplingParams
from rackmount.execution.codec import MessageCodec
from rackmount.sampling import grammars
from rackmount.sampling.request import SamplingRequest
from rackmount.scheduling.plan import StepPlan
from rackmount_registry import hookimpl
from rackmount_registry.descriptors import GrammarBackend
from rackmount_registry.errors import PluginError, RequestError
from rackmount_registry.grammar import Grammar, GrammarContext
from rackmount_registry.plugins import PluginManager

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["kind", "sizes"],
}


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["kind", "sizes"] and value["kind"] in ("one", "two")
    return len(value["sizes"]) <= 2 and all(type(size) is int for size in value["sizes"])


CASES: list[tuple[GrammarSpec, Callable[[str], Any]]] = [
    (GrammarSpec(json_schema=json.dumps(SCHEMA)), is_of_schema),
    (GrammarSpec(regex="[A-F]{2,6}-[0-9]{2}"), re.compile("[A-F]{2,6}-[0-9]{2}").fullmatch),
    (GrammarSpec(choice=("yes", "né", "😀")), ("yes", "né", "😀").__contains__),
    (GrammarSpec(ebnf='root ::= "(" [a-c]{1,3} ")"'), re.compile(r"\([a-c]{1,3}\)").fullmatch),
]
PROMPTS = ["once upon a time A", "B", "C there was", "and D", "E"]
FREE = {"temperature": 1.0, "max_tokens": 160}
NEIGHBOURS = ["a neighbour K", "L"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows no JSON: of what a grammar allows it draws all alike, or the lowest."""
    return chain_checkpoint(tmp_path_factory.mktemp("chain"))


SCHEDULES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "a step ahead": {"async_scheduling": True},
    "in chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "in chunks, a step ahead": {
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "async_scheduling": True,
    },
    "preempted": {"num_kv_blocks": 28},
    "preempted, a step ahead": {"num_kv_blocks": 28, "async_scheduling": True},
    "preempted, uncached": {"num_kv_blocks": 28, "enable_prefix_caching": False},
}


def requests() -> list[SamplingParams]:
    """Those of PROMPTS, then those of NEIGHBOURS."""
    params = [
        SamplingParams(seed=seed, grammar=spec, **FREE) for seed, (spec, _) in enumerate(CASES)
    ]
    several = SamplingParams(seed=9, n=3, grammar=CASES[1][0], **FREE)
    return [*params, several, greedy(60), SamplingParams(seed=7, max_tokens=60, ignore_eos=True)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[str]]:
    """The texts, each request by itself."""
    engine = tiny_engine(folder, num_kv_blocks=256)
    prompts = [*PROMPTS, *NEIGHBOURS]
    alone = [
        engine.generate(prompt, given) for prompt, given in zip(prompts, requests(), strict=True)
    ]
    return [[answer.text for answer in output.outputs] for (output,) in map(as_list, alone)]


def as_list(outputs: Any) -> list[Any]:
    return outputs if isinstance(outputs, list) else [outputs]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_answer_is_of_its_grammar_and_the_same_however_it_is_scheduled(
    schedule: str, folder: Path, expected: list[list[str]]
) -> None:
    engine = tiny_engine(folder, **({"num_kv_blocks": 256} | SCHEDULES[schedule]))
    outputs = engine.generate([*PROMPTS, *NEIGHBOURS], requests())
    assert [[answer.text for answer in output.outputs] for output in outputs] == expected
    checks = [check for _, check in CASES] + [CASES[1][1]]
    for output, check in zip(outputs, checks, strict=False):
        for answer in output.outputs:
            assert answer.finish_reason == "stop" and answer.stop_reason == EOS
            assert check(answer.text), answer.text
    assert len({answer.text for answer in outputs[4].outputs}) > 1
    assert ("preempted" in schedule) == (engine.stats.total_preemptions > 0)
    assert_idle(engine)


def test_an_answer_cut_by_its_length_is_the_beginning_of_a_text(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, grammar=GrammarSpec(regex="[a-c]+~"))
    (output,) = as_list(tiny_engine(folder).generate("x", params))
    assert (output.text, output.outputs[0].finish_reason) == ("abcabcabc", "length")


def test_the_model_ends_where_it_likes_but_not_before_the_text_is_whole(tmp_path: Path) -> None:
    engine = tiny_engine(chain_checkpoint(tmp_path, {ord(each): EOS for each in "xa"}))

    def answer(spec: GrammarSpec, **others: Any) -> tuple[str, str]:
        params = SamplingParams(temperature=0, max_tokens=20, grammar=spec, **others)
        (output,) = as_list(engine.generate("x", params))
        return output.text, output.outputs[0].finish_reason

    assert answer(GrammarSpec(regex="a*")) == ("", "stop")
    assert answer(GrammarSpec(regex="a+")) == ("a", "stop")
    assert answer(GrammarSpec(regex="a{3,}")) == ("aaa", "stop")
    assert answer(GrammarSpec(regex="a+"), min_tokens=5) == ("aaaaa", "stop")
    assert answer(GrammarSpec(choice=("aa",)), min_tokens=5) == ("aa", "stop")
    turn = {"stop_token_ids": [END_OF_TURN], "ignore_eos": True}
    assert answer(GrammarSpec(choice=("aa",)), **turn) == ("aa", "stop")
    assert answer(GrammarSpec(choice=("aab",)), stop_token_ids=[ord("b")]) == ("aa", "stop")
    assert answer(GrammarSpec(choice=("abc",)), stop="b") == ("a", "stop")
    assert_idle(engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_grammar_at_odds_with_other_rules_fails_its_request_alone(
    ahead: bool, folder: Path
) -> None:
    engine = tiny_engine(folder, async_scheduling=ahead)
    alone = tokens_of(engine, [[65, 66], [70]], greedy(12))
    odd = greedy(12, ignore_eos=False, grammar=GrammarSpec(choice=("yes",)), bad_words=["e"])
    outputs = engine.generate([[65, 66], "y", [70]], [greedy(12), odd, greedy(12)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].text == "y"
    assert [outputs[0].token_ids, outputs[2].token_ids] == alone
    assert_idle(engine)


def test_what_cannot_be_kept_to_is_refused_at_the_door_and_the_others_go_on(folder: Path) -> None:
    engine = tiny_engine(folder)
    fine = SamplingParams(temperature=0, grammar=GrammarSpec(choice=("b",)))
    bad = SamplingParams(grammar=GrammarSpec(regex="(a"))
    with pytest.raises(RequestError, match="parenthesis is not closed"):
        engine.generate("x", bad)
    with pytest.raises(RequestError, match="'not' is not supported"):
        engine.generate("x", SamplingParams(grammar=GrammarSpec(json_schema='{"not": {}}')))
    with pytest.raises(RequestError, match="no token ends the answer"):
        engine.generate("x", SamplingParams(grammar=GrammarSpec(regex="a"), ignore_eos=True))
    with pytest.raises(TypeError, match="grammar='a' is a str; it must be a GrammarSpec"):
        SamplingParams(grammar="a")  # type: ignore[arg-type]
    refused, answered = engine.generate(["x", "y"], [bad, fine])
    assert isinstance(refused.error, RequestError) and answered.text == "b"
    assert_idle(engine)


def test_without_a_tokenizer_or_a_backend_grammars_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    params = SamplingParams(grammar=GrammarSpec(regex="a"))
    bare = tiny_checkpoint(tmp_path, "llama")[0]
    with pytest.raises(RequestError, match="no tokenizer"):
        tiny_engine(bare).generate([1, 2], params)
    others = [offer for offer in plugins().offers() if offer.descriptor.kind != "grammar_backend"]
    engine = tiny_engine(folder, manager=PluginManager(others))
    with pytest.raises(RequestError, match="`pip install rackmount-plugins-xgrammar` brings one"):
        engine.generate("x", params)
    assert tokens_of(engine, [[65]], greedy(2)) == [[66, 67]]


class Unsteady:
    """A backend that takes every grammar, and compiles none."""

    def __init__(self, context: GrammarContext) -> None:
        assert context.vocab_size == 260

    def check(self, spec: GrammarSpec) -> None:
        pass

    def compile(self, spec: GrammarSpec) -> Grammar:
        raise RequestError("after all not")


def unsteady(folder: Path, **arguments: Any) -> Engine:
    part = GrammarBackend(name="unsteady", factory=f"{__name__}:Unsteady", forms=("regex",))
    own = SimpleNamespace(grammar_backends=hookimpl(lambda: [part]))
    manager = plugins() + PluginManager.from_modules({"own": own})
    return tiny_engine(folder, manager=manager, **arguments)


def test_a_backend_is_chosen_by_name_and_asked_for_what_it_compiles(folder: Path) -> None:
    engine = unsteady(folder, grammar_backend="unsteady")
    assert engine.rack.grammar is not None and engine.rack.grammar.distribution == "own"
    with pytest.raises(RequestError, match="unsteady compiles no choice; it takes regex"):
        engine.generate("x", SamplingParams(grammar=GrammarSpec(choice=("a",))))
    automatic = unsteady(folder).rack.grammar
    assert automatic is not None and automatic.name == "xgrammar"
    with pytest.raises(PluginError, match=r"grammar_backend .x.; mounted: unsteady, xgrammar"):
        unsteady(folder, grammar_backend="x")


def test_a_grammar_that_fails_in_the_worker_ends_its_request_alone(folder: Path) -> None:
    engine = unsteady(folder, grammar_backend="unsteady")
    params = [SamplingParams(grammar=GrammarSpec(regex="a")), greedy(3)]
    failed, neighbour = engine.generate(["x", "A"], params)
    assert (failed.text, failed.outputs[0].finish_reason) == ("", "error")
    assert neighbour.text == "BCD"
    assert_idle(engine)


@pytest.mark.parametrize("name", ["check", "compile"])
def test_a_grammar_that_takes_for_ever_holds_up_the_others_for_a_time(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Event()
    monkeypatch.setattr(Unsteady, name, lambda *_: release.wait())
    monkeypatch.setattr(grammars, f"{name.upper()}_S", 0.05)
    engine = unsteady(folder, grammar_backend="unsteady")
    params = [SamplingParams(grammar=GrammarSpec(regex="a")), greedy(3)]
    failed, neighbour = engine.generate(["x", "A"], params)
    assert neighbour.text == "BCD"
    if name == "check":
        assert "regex takes more than 0.05 s to compile" in str(failed.error)
    else:
        assert failed.outputs[0].finish_reason == "error"
    assert_idle(engine)
    release.set()


def test_a_grammar_crosses_to_other_processes(folder: Path) -> None:
    engine = tiny_engine(folder)
    codec, plans = MessageCodec(), []
    submit = engine.core.executor.submit

    def recorded(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    engine.core.executor.submit = recorded  # type: ignore[method-assign]
    spec = GrammarSpec(choice=("b", "c"))
    engine.generate("x", SamplingParams(grammar=spec))
    restored = codec.decode(codec.encode(plans[0]))
    assert isinstance(restored, StepPlan)
    sampling = restored.admitted[0].sampling
    assert isinstance(sampling, SamplingRequest)
    assert sampling.params.grammar == spec and sampling.end_ids == {EOS}
