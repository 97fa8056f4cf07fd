"""Prompts of every kind, good and bad."""

import re

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rackmount.text.prompts import (
    encode,
    encode_bad_words,
    eos_ids,
    normalize_prompts,
)

BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'robot' %}"
    "{{ raise_exception('no robots') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{% if loud %}!{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]
LIMITS = {"vocab_size": 258, "max_model_len": 16}


def tokenizer(bos: bool = False, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Id = byte, then BOS and EOS; `bos` puts one before every text."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>"), AddedToken("<eos>")])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )


def sentencepiece() -> PreTrainedTokenizerFast:
    """Every text gets a space before it; a newline is a byte token."""
    pieces = ["<unk>", "▁", "b", "a", "d", "ba", "bad", "▁bad", "<0x0A>"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("b", "a"), ("ba", "d"), ("▁", "bad")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("single", ["hi", "", [1, 2], CHAT, (1, 2), 7, {"role": "user"}])
def test_one_prompt_is_told_from_a_batch(single):
    assert normalize_prompts(single) == ([single], True)


@pytest.mark.parametrize(
    "batch", [[], ["hi"], ["hi", [1], CHAT, 7], [[1, 2], []], [[]], [CHAT, "hi"]]
)
def test_a_list_that_starts_with_a_prompt_is_a_batch(batch):
    assert normalize_prompts(batch) == (batch, False)
    assert normalize_prompts(tuple(batch)) == (batch, False)


def test_a_text_gets_the_special_tokens_that_its_tokenizer_adds():
    assert encode("hi", tokenizer(), **LIMITS) == [*b"hi"]
    assert encode("hi", tokenizer(bos=True), **LIMITS) == [BOS, *b"hi"]


def test_token_ids_are_taken_as_they_are_with_or_without_a_tokenizer():
    assert encode([1, 257], tokenizer(bos=True), **LIMITS) == [1, 257]
    numpy_ids = encode(tuple(np.array([1, 2])), None, **LIMITS)
    assert (numpy_ids, {type(i) for i in numpy_ids}) == ([1, 2], {int})


def test_a_chat_is_what_its_template_makes_of_it():
    assert encode(CHAT, tokenizer(bos=True), **LIMITS) == [BOS, *b"u:hi", EOS, *b"a:"]
    closed = encode(CHAT, tokenizer(), **LIMITS, add_generation_prompt=False)
    assert closed == [BOS, *b"u:hi", EOS]
    loud = encode(CHAT, tokenizer(), **LIMITS, chat_template_kwargs={"loud": True})
    assert loud == [BOS, *b"u:hi", EOS, *b"a:!"]


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_bos():
    assert encode("", tokenizer(bos=True), **LIMITS) == [BOS]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", "prompt '' has no token; it needs at least one"),
        ([], "prompt [] has no token; it needs at least one"),
        (
            [1, 258],
            "token id 258 at index 1 of the prompt is outside the vocabulary; "
            "legal ids are 0 to 257",
        ),
        ([-1], "token id -1 at index 0 of the prompt is outside the vocabulary"),
        ([1, True], "token id True at index 1 of the prompt is of type bool; it must be an int"),
        ([1.0], "token id 1.0 at index 0 of the prompt is of type float; it must be an int"),
        ([1, "a"], "token id 'a' at index 1 of the prompt is of type str; it must be an int"),
        ([None], "token id None at index 0 of the prompt is of type NoneType"),
        (
            16 * [1],
            "prompt of 16 tokens is too long: max_model_len=16, one place of it for output, "
            "allows at most 15",
        ),
        ("a" * 16, "prompt of 16 tokens is too long"),
        (7, "prompt 7 is of type int; it must be a str, a list of token ids or a list of messages"),
        (None, "prompt None is of type NoneType; it must be"),
        (CHAT[0], "is of type dict; it must be"),
        ("\ud800", "surrogates not allowed"),
        ([{"role": "user"}], "at index 0 has no 'content' that is a str"),
        ([*CHAT, {"content": "hi"}], "at index 1 has no 'role' that is a str"),
        ([*CHAT, {"role": "user", "content": None}], "at index 1 has no 'content' that is a str"),
        ([*CHAT, "hi"], "message 'hi' at index 1 has no 'role' that is a str"),
        ([{"role": "robot", "content": ""}], "the chat template failed: TemplateError: no robots"),
    ],
)
def test_a_bad_prompt_is_refused_with_value_and_rule(prompt, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        encode(prompt, tokenizer(), **LIMITS)


def test_the_longest_prompt_leaves_one_place():
    assert len(encode(15 * [1], None, **LIMITS)) == 15


@pytest.mark.parametrize("prompt", ["hi", CHAT])
def test_text_without_a_tokenizer_is_refused(prompt):
    with pytest.raises(ValueError, match="no tokenizer to encode text; give lists of token ids"):
        encode(prompt, None, **LIMITS)


def test_a_chat_without_a_template_is_refused_unless_it_brings_one():
    bare = tokenizer(template=None)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        encode(CHAT, bare, **LIMITS)
    own = {"chat_template": "{{ messages[0].content }}"}
    assert encode(CHAT, bare, **LIMITS, chat_template_kwargs=own) == [*b"hi"]


def test_template_options_that_break_the_call_are_a_value_error():
    with pytest.raises(ValueError, match="the chat template failed: TypeError"):
        encode(CHAT, tokenizer(), **LIMITS, chat_template_kwargs={"tokenize": False})


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 1}, {1, 106, EOS}),
        ({}, {"eos_token_id": None}, {EOS}),
        ({"eos_token_id": 0}, {}, {0, EOS}),
    ],
)
def test_eos_ids_are_the_union_of_all_that_name_some(generation, config, ids):
    assert eos_ids(tokenizer(), generation, config) == ids
    assert eos_ids(None, generation, config) == ids - {EOS}


def test_bad_words_are_written_with_and_without_a_space():
    assert encode_bad_words(["bad", " no"], tokenizer(bos=True)) == [
        [*b"bad"],
        [*b" bad"],
        [*b"no"],
        [*b" no"],
    ]


def test_a_sentencepiece_bad_word_is_found_inside_a_text_too():
    pieces = sentencepiece()
    spellings = [pieces.convert_ids_to_tokens(ids) for ids in encode_bad_words(["bad"], pieces)]
    assert spellings == [["bad"], ["▁bad"]]


@pytest.mark.parametrize("word", ["", "  "])
def test_an_empty_bad_word_is_refused(word):
    with pytest.raises(ValueError, match=f"bad word '{word}' at index 1 has no token"):
        encode_bad_words(["a", word], tokenizer())


def test_bad_words_need_a_tokenizer():
    with pytest.raises(ValueError, match="no tokenizer to encode text"):
        encode_bad_words(["a"], None)
