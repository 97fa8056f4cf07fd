import json
import re
from typing import Any

import numpy as np
import pytest
from tests.helpers.engines import BOS, END_OF_TURN, EOS, NUM_BYTE_IDS, byte_tokenizer
from tests.helpers.grammars import accepts, allowed, byte_backend
from tokenizers import AddedToken

from rackmount_registry.errors import RequestError
from rackmount_registry.grammar import GrammarContext, GrammarSpec
from rackmount_registry.offers import is_installed
from rackmount_xgrammar.backend import XGrammar
from rackmount_xgrammar.plugin import grammar_backends
from rackmount_xgrammar.vocabulary import texts_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "kinds"],
}
WORDS = ("yes", "yesterday", 'qu"ote\\', "né\n", "😀")


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "kinds"] and len(value["name"]) <= 3
    return len(value["kinds"]) <= 2 and set(value["kinds"]) <= {"a", "b"}


@pytest.mark.parametrize(
    ("spec", "is_right"),
    [
        (GrammarSpec(json_schema=json.dumps(SCHEMA)), is_of_schema),
        (GrammarSpec(regex=r"[a-c]{1,3}(x|é)?\d"), re.compile(r"[a-c]{1,3}(x|é)?\d").fullmatch),
        (GrammarSpec(choice=WORDS), WORDS.__contains__),
        (GrammarSpec(ebnf='root ::= "(" root ")" | "x"'), re.compile(r"\(*x\)*").fullmatch),
    ],
    ids=["json_schema", "regex", "choice", "ebnf"],
)
def test_whatever_is_drawn_of_what_is_allowed_is_a_text_of_the_grammar(
    spec: GrammarSpec, is_right: object
) -> None:
    generator = np.random.default_rng(0)
    grammar = byte_backend().compile(spec)
    for _ in range(20):
        matcher, drawn = grammar.matcher([EOS]), []
        while not matcher.is_terminated:
            choices = allowed(matcher)
            assert choices and BOS not in choices and END_OF_TURN not in choices
            # No white space without need; and 0xed begins surrogates too, which xgrammar takes.
            sensible = [token for token in choices if token not in {*b" \n\xed"}]
            drawn.append(int(generator.choice(sensible or choices)))
            assert matcher.accept(drawn[-1])
        assert drawn.pop() == EOS
        assert is_right(bytes(drawn).decode())  # type: ignore[operator]


def test_a_json_object_is_any_and_nothing_else() -> None:
    grammar = byte_backend().compile(GrammarSpec(json_object=True))
    for text in ("{}", '{"a": {"b": [1, -2.5e3, null, "\\u00e9\\n"]}, "c": true}', "{\n  \n}"):
        assert accepts(grammar, text)
    for text in ("[]", "1", '{"a"}', '{"a": 01}', "{}{}", " {}", '{"a":' + " " * 99 + "1}"):
        assert not accepts(grammar, text)


def test_a_token_is_allowed_just_where_it_is_accepted() -> None:
    grammar = byte_backend().compile(GrammarSpec(regex="a[b-d]?"))
    for begin in ([], [ord("a")], [ord("a"), ord("c")]):
        taken = []
        for token_id in range(NUM_BYTE_IDS):
            matcher = grammar.matcher([EOS])
            assert all(map(matcher.accept, begin))
            if matcher.accept(token_id):
                taken.append(token_id)
                assert matcher.is_terminated == (token_id == EOS)
        matcher = grammar.matcher([EOS])
        assert all(map(matcher.accept, begin)) and allowed(matcher) == taken


def test_matchers_of_one_grammar_do_not_know_each_other() -> None:
    grammar = byte_backend().compile(GrammarSpec(choice=("ab", "cd")))
    one, other = grammar.matcher([EOS]), grammar.matcher([EOS])
    assert one.accept(ord("a")) and allowed(one) == [ord("b")]
    assert allowed(other) == [ord("a"), ord("c")]


def test_nothing_follows_the_end() -> None:
    matcher = byte_backend().compile(GrammarSpec(regex="a*")).matcher([EOS])
    assert matcher.accept(EOS) and matcher.is_terminated
    assert not matcher.accept(ord("a")) and not matcher.accept(EOS)


def test_an_end_with_a_text_of_its_own_is_no_part_of_the_answer() -> None:
    matcher = byte_backend().compile(GrammarSpec(regex="[a-c]{2}")).matcher([ord("b"), END_OF_TURN])
    assert allowed(matcher) == [ord("a"), ord("c")] and not matcher.accept(ord("b"))
    assert matcher.accept(ord("c")) and matcher.accept(ord("a"))
    assert allowed(matcher) == [ord("b"), END_OF_TURN]
    assert matcher.accept(ord("b")) and matcher.is_terminated


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"regex": "(a"}, "regex: Regex parsing error at position 3: The parenthesis is not"),
        ({"regex": "(?=a)b"}, "Lookahead is not supported"),
        ({"regex": r"(a)\1"}, "Backreference is not supported"),
        ({"regex": r"[^\s\S]"}, "regex: there is no text that it allows"),
        ({"ebnf": "root ::= x"}, 'ebnf: EBNF parser error at line 1, column 10: Rule "x" is not'),
        ({"ebnf": 'root ::= root "a"'}, "ebnf: there is no text that it allows"),
        ({"regex": "(" * 2000}, "regex: "),
        ({"ebnf": "root ::= " + "(" * 16_000}, "ebnf: "),
        ({"regex": "a" * 2049}, "regex: 2049 bytes of text; at most 2048 are taken"),
        ({"ebnf": "é" * 8193}, "ebnf: 16386 bytes of text; at most 16384 are taken"),
        ({"json_schema": " " * 32769}, "json_schema: 32769 bytes of text; at most 32768 are taken"),
        ({"choice": ("a" * 180,) * 100}, "choice: 18000 bytes of text; at most 16384 are taken"),
        ({"choice": ("a",) * 1001}, "choice: 1001 texts; at most 1000 are taken"),
    ],
)
def test_a_grammar_that_is_none_is_refused_with_the_reason(
    given: dict[str, Any], reason: str
) -> None:
    for refuse in (byte_backend().check, byte_backend().compile):
        with pytest.raises(RequestError) as caught:
            refuse(GrammarSpec(**given))
        assert str(caught.value).startswith(reason) or reason in str(caught.value)
        assert "/project/" not in str(caught.value)


def test_a_thousand_choices_are_taken() -> None:
    choice = tuple(f"{index:x<16}" for index in range(1000))
    grammar = byte_backend().compile(GrammarSpec(choice=choice))
    assert accepts(grammar, choice[0]) and accepts(grammar, choice[-1])
    assert not accepts(grammar, "x" * 16)


def test_tokens_stand_for_their_bytes_and_special_ones_for_none() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(" two words"), AddedToken("<s>", special=True)])
    texts = texts_of(tokenizer, 263)
    assert texts[:256] == [bytes([value]) for value in range(256)]
    assert texts[256:] == [b"", b"", b"", b" two words", b"", b"", b""]
    assert texts_of(tokenizer, 260) == texts[:260]  # a model may know fewer ids


def test_a_tokenizer_that_cannot_be_read_refuses_the_grammar() -> None:
    class Odd:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    backend = XGrammar(GrammarContext(tokenizer=Odd(), vocab_size=2))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="grammars need another tokenizer"):
        backend.compile(GrammarSpec(regex="a"))


def test_the_offer_is_cheap_and_its_factory_loads() -> None:
    (part,) = grammar_backends()
    assert part.order == 0 and is_installed("xgrammar")
