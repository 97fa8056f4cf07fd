from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from rackmount_gguf.tokenizer import build_tokenizer
from rackmount_registry.errors import CheckpointError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ["ĠĠ", "12", "ab", "Ġab", "abc"]
"""Merges make all but `abc`."""
SPECIAL = ["<s>", "</s>", "<|end|>", "<think>"]
TOKENS = SPECIAL + BYTES + MERGED
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def byte_level(pre: str | None, **more: Any) -> Any:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(TOKENS) - 4),
        "tokenizer.ggml.merges": ["Ġ Ġ", "1 2", "a b", "Ġ ab"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    given = {key: value for key, value in metadata.items() if value is not None}
    return build_tokenizer(given, Path("tiny.gguf"))


def pieces(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "12", ["12"]),
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ", "12"]),
        ("smollm", "12", ["1", "2"]),
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("qwen2", "12", ["1", "2"]),
        ("qwen2", "a  12", ["a", "Ġ", "Ġ", "1", "2"]),
        ("gpt-2", "abc", ["ab", "c"]),
        ("smollm", " ab", ["Ġab"]),
        ("llama-bpe", "abc", ["<s>", "abc"]),
        ("llama-bpe", "12122", ["<s>", "12", "1", "2", "2"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_says(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(byte_level(pre), text) == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_text_survives_the_round_trip(pre: str) -> None:
    tokenizer = byte_level(pre)
    for text in (
        "",
        "  two  spaces ",
        "día 漢字 😀👍🏽",
        "a\r\n\tb\n\n",
        "2024½",
        "'s 'LL",
        "\u00a0",
    ):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


def test_special_and_user_defined_tokens_stay_whole() -> None:
    tokenizer = byte_level("smollm")
    assert pieces(tokenizer, "ab<|end|>12<think>") == ["ab", "<|end|>", "1", "2", "<think>"]
    ids = tokenizer("ab<|end|><think>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>"


def test_names_and_template_come_from_the_metadata() -> None:
    tokenizer = byte_level("smollm", padding_token_id=2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s>ab<|end|>"


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("smollm", {}, ["ab"]),
        ("smollm", {"add_bos_token": True}, ["<s>", "ab"]),
        ("llama-bpe", {}, ["<s>", "ab"]),
        ("llama-bpe", {"add_bos_token": False}, ["ab"]),
        ("llama-bpe", {"bos_token_id": None}, ["ab"]),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "ab", "</s>"]),
    ],
)
def test_bos_and_eos_are_added_where_the_file_says(
    pre: str, flags: dict[str, Any], expected: list[str]
) -> None:
    assert pieces(byte_level(pre, **flags), "ab") == expected


def test_qwen2_composes_characters_first() -> None:
    assert byte_level("qwen2")("e\u0301").input_ids == byte_level("gpt-2")("é").input_ids


def sentencepiece(**more: Any) -> Any:
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "ab", "bc", "▁ab"]
    scores = [0.0] * 6 + [-10.0, -11.0, -12.0, -2.0, -1.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6] + [1] * 7,
        "tokenizer.ggml.bos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return build_tokenizer(metadata, Path("tiny.gguf"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["<s>", "▁ab"]),
        ("abc", ["<s>", "▁", "a", "bc"]),
        (" ab", ["<s>", "▁", "▁ab"]),
        ("bé", ["<s>", "▁", "b", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_merges_the_best_score_first(text: str, expected: list[str]) -> None:
    tokenizer = sentencepiece()
    assert pieces(tokenizer, text) == expected
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_sentencepiece_may_do_without_the_first_space() -> None:
    assert pieces(sentencepiece(add_space_prefix=False), "ab ab") == ["<s>", "ab", "▁ab"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pre": "tekken"}, r"tiny\.gguf has pre-tokenizer 'tekken'; those that are read: gpt-2"),
        ({"pre": None}, "has pre-tokenizer None"),
        ({"pre": "smollm", "model": "t5"}, "has tokenizer 't5'; those that are read: gpt2, llama"),
        ({"pre": "smollm", "merges": None}, r"'gpt2' without tokenizer\.ggml\.merges"),
    ],
)
def test_an_unknown_tokenizer_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        byte_level(**given)


def test_a_file_without_a_vocabulary_has_no_tokenizer() -> None:
    assert build_tokenizer({"general.architecture": "llama"}, Path("tiny.gguf")) is None
