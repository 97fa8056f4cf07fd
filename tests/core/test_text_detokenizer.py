"""Streamed text against one-shot decoding, on small tokenizers of the two common kinds."""

import json
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rackmount.text.detokenizer import MAX_PENDING, Detokenizer

BROKEN = "\ufffd"
SPECIAL = ["<s>", "</s>", "<tool>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Ďábel, ďas, ď.",
    "日本語の文章はとても長いです。日本語の本。 하늘과 바람과 별과 시",
]
HARD_TEXTS = [
    "ď",
    "the ď dog",
    "😀",
    "two 😀😁 of them",
    "family 👩‍👩‍👧‍👦 joined by ZWJ",
    "combining e\u0301 o\u0308\u0323",
    "नमस्ते 日本語 하늘",
    "a  space,\n\ta tab \n\n and lines  ",
    "a real \ufffd and \ufffd\ufffd\ufffd\ufffd\ufffd more",
]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind. Without its regular expression, merges cross the borders of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama-2's kind: a space before the text, bytes for characters that the corpus lacks."""
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = spaces
    trainer = trainers.BpeTrainer(vocab_size=90, show_progress=False)
    trained.train_from_iterator(CORPUS[:1] * 4, trainer)
    learned = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


KINDS = pytest.mark.parametrize("kind", [byte_level, byte_fallback])


def ids_of_bytes(kind, data: bytes) -> list[int]:
    """One token for each byte."""
    names = bytes_to_unicode()
    pieces = [names[b] if kind is byte_level else f"<0x{b:02X}>" for b in data]
    return kind().convert_tokens_to_ids(pieces)


def stream(tokenizer, prompt, output, skip=True) -> list[str]:
    """What each token's push gives, then what the flush gives."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [detokenizer.push([token_id]) for token_id in output] + [detokenizer.flush()]


def after_prompt(tokenizer, prompt, output, skip=True) -> str:
    """One-shot decoding of prompt and output, the prompt's text cut off."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assume(whole.startswith(before) and not before.endswith(BROKEN))
    return whole[len(before) :]


@KINDS
@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("by_bytes", [False, True])
def test_a_text_streams_whole_and_without_half_characters(kind, text, by_bytes):
    tokenizer = kind()
    output = (
        ids_of_bytes(kind, text.encode())
        if by_bytes
        else tokenizer.encode(text, add_special_tokens=False)
    )
    pieces = stream(tokenizer, [], output)
    assert "".join(pieces) == tokenizer.decode(output) == text
    assert sum(piece.count(BROKEN) for piece in pieces) == text.count(BROKEN)


@KINDS
def test_a_character_over_several_tokens_comes_with_its_last_byte(kind):
    assert stream(kind(), [], ids_of_bytes(kind, "ď😀".encode())) == ["", "ď", *3 * [""], "😀", ""]


@KINDS
def test_an_unfinished_character_comes_broken_from_the_flush_alone(kind):
    word = kind().encode("dog", add_special_tokens=False)
    *pushes, flushed = stream(kind(), [], word + ids_of_bytes(kind, b"\xf0\x9f\x98"))
    assert "".join(pushes) == "dog"
    assert "dog" + flushed == kind().decode(word + ids_of_bytes(kind, b"\xf0\x9f\x98"))
    assert set(flushed) == {BROKEN}


def test_a_flush_gives_what_is_held_only_once():
    detokenizer = Detokenizer(byte_level(), [], skip_special_tokens=True)
    detokenizer.push(ids_of_bytes(byte_level, b"\xf0"))
    assert [detokenizer.flush(), detokenizer.flush()] == [BROKEN, ""]


@KINDS
@settings(deadline=None)
@given(data=st.data())
def test_any_text_after_any_prompt_streams_as_it_decodes(kind, data):
    tokenizer = kind()
    texts = st.text(max_size=40) | st.sampled_from([*CORPUS, *HARD_TEXTS])
    ids = tokenizer.encode(data.draw(texts) + data.draw(texts), add_special_tokens=False)
    start = data.draw(st.integers(0, len(ids)))
    prompt, output = [0, *ids[:start]], ids[start:]
    skip = data.draw(st.booleans())
    expected = after_prompt(tokenizer, prompt, output, skip)

    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces = []
    while output:
        size = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(output[:size]))
        output = output[size:]
    if BROKEN not in expected:
        assert BROKEN not in "".join(pieces)
    assert "".join(pieces) + detokenizer.flush() == expected


NASTY_IDS = st.sampled_from(
    [
        *ids_of_bytes(byte_level, "a ďあ😀\ufffd".encode() + b"\x80\xc0\xed\xf4\xff"),
        *(1, 10_000),
    ]
)


@settings(deadline=None, max_examples=300)
@given(st.lists(NASTY_IDS | st.integers(0, 449), max_size=4 * MAX_PENDING), st.booleans())
@example(ids_of_bytes(byte_level, b"\xff" * 40 + "😀".encode()), True)
@example(ids_of_bytes(byte_level, b"\xe2\x82" * 30 + "€".encode()), True)
@example(ids_of_bytes(byte_level, b"\xff\xff\xf0\x9f\x98") + [1] * 40, True)
def test_any_tokens_of_a_byte_level_vocabulary_stream_as_they_decode(output, skip):
    tokenizer = byte_level()
    expected = tokenizer.decode(output, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, [], output, skip)) == expected


@settings(deadline=None)
@given(st.lists(st.binary(max_size=6) | st.sampled_from(["ď", "😀", BROKEN, "the"])))
@example([b"\xf0"] * 50)
@example([b"\xff", *["é"] * 50])
@example([b"\xf0", *[BROKEN] * 50])
def test_broken_bytes_of_a_fallback_vocabulary_swallow_nothing_after_them(parts):
    tokenizer = byte_fallback()
    output = []
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        output += ids_of_bytes(byte_fallback, data)
    text = "".join(stream(tokenizer, [], output + tokenizer.encode("the dog")))
    assert text.endswith(" the dog") or text == "the dog"


def test_a_broken_byte_leaves_the_fallback_characters_that_are_out():
    word = byte_fallback().convert_tokens_to_ids("▁the")
    ids = [*ids_of_bytes(byte_fallback, "éé".encode() + b"\xff"), word]
    assert byte_fallback().decode(ids) == 5 * BROKEN + " the"  # what no stream could know
    assert "".join(stream(byte_fallback(), [], ids)) == f"éé{BROKEN} the"


@KINDS
@pytest.mark.parametrize("junk", ["\ufffd".encode(), b"\xff", b"\x80", b"\xf0\x9f"])
def test_broken_text_comes_late_by_a_few_characters_at_most(kind, junk):
    output = ids_of_bytes(kind, junk * 100)
    pieces = stream(kind(), [], output)
    assert "".join(pieces) == kind().decode(output)
    assert len(pieces[-1]) <= 3


@KINDS
@pytest.mark.parametrize("data", [b"the dog ", "😀".encode(), b"\xff", b"\xf0", b"ok\xe3\x81"])
@pytest.mark.parametrize("special", [[], [1], [10_000]])
def test_the_cost_of_a_token_does_not_grow(kind, data, special):
    sizes = []

    def decode(ids, skip_special_tokens):
        sizes.append(len(ids))
        return kind().backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    recorder = SimpleNamespace(
        backend_tokenizer=SimpleNamespace(decode=decode),
        convert_ids_to_tokens=kind().convert_ids_to_tokens,
    )
    output = 500 * (ids_of_bytes(kind, data) + special) + 500 * special
    stream(recorder, ids_of_bytes(kind, b"the quick brown fox" * 100), output)
    assert max(sizes) <= 2 * MAX_PENDING + 2
    assert len(sizes) <= 5 * len(output)


@KINDS
def test_special_tokens_are_skipped_or_kept(kind):
    tokenizer = kind()
    output = tokenizer.encode("the<tool> dog</s>", add_special_tokens=False)
    assert "".join(stream(tokenizer, [], output, skip=False)) == "the<tool> dog</s>"
    assert "".join(stream(tokenizer, [], output, skip=True)) == "the dog"


@KINDS
def test_a_special_token_inside_a_character_is_skipped(kind):
    first, *rest = ids_of_bytes(kind, "ď".encode())
    assert "".join(stream(kind(), [], [first, 1, *rest])) == "ď"


@KINDS
@pytest.mark.parametrize("num_special", [0, 1, 3, 100])
def test_the_first_space_of_the_output_stays_where_the_prompt_has_text(kind, num_special):
    tokenizer = kind()
    (space,) = tokenizer.convert_tokens_to_ids(["Ġ" if kind is byte_level else "▁"])
    prompt = tokenizer.encode("the", add_special_tokens=False) + num_special * [1]
    output = num_special * [1] + [space, *ids_of_bytes(kind, b"!")]
    assert "".join(stream(tokenizer, prompt, output)) == " !"


def test_the_first_space_of_a_sentencepiece_text_goes():
    output = byte_fallback().encode("the dog", add_special_tokens=False)
    assert "".join(stream(byte_fallback(), [0], output)) == "the dog"
    assert "".join(stream(byte_fallback(), [0], 40 * [1] + output)) == "the dog"
    assert "".join(stream(byte_fallback(), [0], output, skip=False)) == " the dog"  # after "<s>"


def test_spaces_alone_are_not_lost():
    tokenizer = byte_fallback()
    space, word = tokenizer.convert_tokens_to_ids(["▁", "▁the"])
    assert "".join(stream(tokenizer, [], [space, space, word])) == "  the"
    assert "".join(stream(tokenizer, [word], [space, word])) == "  the"


@KINDS
def test_a_prompt_that_ends_inside_a_character_leaves_the_output_as_it_decodes_alone(kind):
    first, *rest = ids_of_bytes(kind, "😀".encode())
    output = rest + kind().encode("dog", add_special_tokens=False)
    pieces = stream(kind(), [*ids_of_bytes(kind, b"a"), first], output)
    assert "".join(pieces) == kind().decode(output)


@KINDS
def test_a_prompt_that_ends_in_a_real_replacement_character_is_not_repeated(kind):
    prompt = ids_of_bytes(kind, "a\ufffd".encode())
    assert "".join(stream(kind(), prompt, ids_of_bytes(kind, "é!".encode()))) == "é!"


@KINDS
def test_a_run_of_bytes_goes_on_from_the_prompt(kind):
    prompt = ids_of_bytes(kind, "日本語日本語日本語日本語".encode())
    assert stream(kind(), prompt, ids_of_bytes(kind, "の".encode())) == ["", "", "の", ""]


def test_a_tokenizer_without_a_fast_backend_is_decoded_through_its_own_method():
    plain = SimpleNamespace(
        decode=lambda ids, skip_special_tokens, clean_up_tokenization_spaces: "".join(
            map(chr, ids)
        ),
        convert_ids_to_tokens=lambda ids: [chr(i) for i in ids],
    )
    assert stream(plain, [], [104, 105]) == ["h", "i", ""]
