from types import SimpleNamespace

import pytest

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import GrammarBackend
from rackmount_registry.errors import ConfigError, PluginError
from rackmount_registry.grammar import FORMS, GrammarSpec
from rackmount_registry.plugins import PluginManager


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("json_schema", "{}"),
        ("json_object", True),
        ("regex", "a"),
        ("choice", ("a", "b")),
        ("ebnf", 'root ::= "a"'),
    ],
)
def test_a_grammar_has_one_form_and_equal_ones_are_one_key(form: str, value: object) -> None:
    spec = GrammarSpec(**{form: value})
    assert spec.form == form and form in FORMS
    assert {spec: 1}[GrammarSpec(**{form: value})] == 1
    with pytest.raises(ConfigError, match="give exactly one of json_schema, json_object, regex"):
        GrammarSpec(**{"regex": "x", "choice": ["x"], form: value})


def test_choices_may_be_a_list() -> None:
    assert GrammarSpec(choice=["a"]) == GrammarSpec(choice=("a",))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, ConfigError, "a grammar is given as nothing"),
        ({"choice": ()}, ConfigError, "given as nothing; give exactly one"),
        ({"regex": ""}, ConfigError, "regex is empty"),
        ({"choice": ("a", "")}, ConfigError, "choice entry is empty"),
        ({"regex": "\ud800"}, ConfigError, "no Unicode text"),
        ({"regex": b"a"}, TypeError, "regex=b'a' must be a string"),
        ({"json_schema": {}}, TypeError, "json_schema={} must be a string"),
        ({"choice": "ab"}, TypeError, "choice='ab' must be a tuple of strings"),
        ({"choice": (1,)}, TypeError, "choice entry=1 must be a string"),
        ({"json_object": 1}, TypeError, "json_object=1 must be True or False"),
    ],
)
def test_a_grammar_that_says_nothing_is_refused(
    given: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        GrammarSpec(**given)


def mount(*parts: GrammarBackend) -> PluginManager:
    hooks = SimpleNamespace(grammar_backends=hookimpl(lambda: list(parts)))
    return PluginManager.from_modules({"own": hooks})


def test_a_backend_says_which_forms_it_compiles() -> None:
    part = GrammarBackend(name="x", factory="m:f", forms=("regex",))
    assert mount(part).find("grammar_backend", "x").descriptor is part
    wrong = GrammarBackend(name="x", factory="m:f", forms=("regexp",))
    assert "forms[0]='regexp' is not Literal" in mount(wrong).broken[0].error


def test_who_brings_a_backend_is_told() -> None:
    with pytest.raises(PluginError, match="`pip install rackmount-plugins-xgrammar` brings"):
        mount().find(GrammarBackend, "xgrammar")
