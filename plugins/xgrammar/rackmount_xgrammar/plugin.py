"""What this distribution offers: grammars compiled by xgrammar."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import GrammarBackend


@hookimpl
def grammar_backends() -> list[GrammarBackend]:
    return [
        GrammarBackend(
            name="xgrammar",
            factory="rackmount_xgrammar.backend:XGrammar",
            summary="JSON Schema, regular expressions, choices and EBNF, by xgrammar",
            forms=("json_schema", "json_object", "regex", "choice", "ebnf"),
            order=0,
        )
    ]
