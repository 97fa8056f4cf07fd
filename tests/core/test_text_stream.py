"""Detokenizer and stop strings together, on a tokenizer with a token for each byte."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rackmount.text.stream import TextDelta, TextStream

END = 256


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Id = byte, and a special token."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def streamed(pieces, **options) -> tuple[str, str | None, int]:
    """All text, what finished it, and the tokens taken."""
    stream, text = TextStream(tokenizer(), b"prompt", **options), ""
    for piece in pieces:
        delta = stream.push(piece)
        text += delta.text
        if delta.finished_by is not None:
            break
    text += stream.finish()
    assert text == stream.text
    return text, stream.finished_by, stream.num_tokens


def test_a_stop_string_across_tokens_leaks_nothing():
    stream = TextStream(tokenizer(), [], stop=["DEFGHIJ"])
    deltas = [stream.push([byte]) for byte in b"abcDEFGHIJ"]
    assert deltas == [
        *(TextDelta(text=char, finished_by=None) for char in "abc"),
        *6 * [TextDelta(text="", finished_by=None)],
        TextDelta(text="", finished_by="DEFGHIJ"),
    ]
    assert (stream.finish(), stream.text) == ("", "abc")


def test_tokens_pushed_after_the_one_that_completes_a_stop_string_are_not_taken():
    assert streamed([b"one STOP two"], stop=["STOP"]) == ("one ", "STOP", 8)
    assert streamed([b"one STOP two"], stop=["STOP"], include_stop_str_in_output=True) == (
        "one STOP",
        "STOP",
        8,
    )


def test_a_stop_string_is_found_in_characters_of_several_tokens():
    assert streamed([[byte] for byte in "ok 😀 ďas".encode()], stop=["ď"]) == ("ok 😀 ", "ď", 10)


def test_what_is_held_at_the_end_comes_from_finish():
    assert streamed([b"ab STO" + b"\xf0\x9f"], stop=["STOP"]) == ("ab STO\ufffd", None, 8)


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens():
    assert streamed([b"a.b.c"], stop=["."], min_tokens=0) == ("a", ".", 2)
    assert streamed([b"a.b.c"], stop=["."], min_tokens=1) == ("a", ".", 2)
    assert streamed([b"a.b.c"], stop=["."], min_tokens=2) == ("a.b", ".", 4)
    assert streamed([b"a.b.c"], stop=["."], min_tokens=9) == ("a.b.c", None, 5)


def test_a_stop_string_that_begins_in_the_first_min_tokens_is_none():
    assert streamed([b"abab"], stop=["ab"], min_tokens=1) == ("ab", "ab", 4)


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_text_only_where_asked_for(skip, text):
    assert streamed([[97, END, 98]], skip_special_tokens=skip, stop=["x"]) == (text, None, 3)


@settings(deadline=None)
@given(
    output=st.lists(st.sampled_from([*"abď😀".encode(), 0xFF, END]), max_size=40),
    sizes=st.lists(st.integers(0, 7), min_size=1),
    stop=st.lists(st.text("abď\ufffd", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_the_text_does_not_depend_on_how_the_tokens_come(output, sizes, stop, include, min_tokens):
    options = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    pieces, rest = [], output
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert streamed([*pieces, rest], **options) == streamed([output], **options)
