"""Tokenizers out of GGUF metadata, as `transformers` objects, without network."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from rackmount_registry.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` of the tokens that text is searched for before anything else."""
_LISTS = {"gpt2": "merges", "llama": "scores"}
"""`tokenizer.ggml.model` -> the list beside the tokens that it needs."""


@dataclass(frozen=True, kw_only=True)
class _ByteLevel:
    """How one family of byte-level BPE vocabularies splits text before merging."""

    split: str | None = None
    """Regular expression of the pieces; None for GPT-2's own."""
    single_digits: bool = False
    """Cut out every digit before that."""
    nfc: bool = False
    whole_words: bool = False
    """A piece that is a token as it stands is taken without merging."""
    add_bos: bool = False
    """Where the file does not say."""


_LLAMA3 = _ByteLevel(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    add_bos=True,
)
_QWEN2 = _ByteLevel(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    nfc=True,
)
_BYTE_LEVELS = {
    "gpt-2": _ByteLevel(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _ByteLevel(single_digits=True),
}
"""By `tokenizer.ggml.pre`."""


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer that the metadata of the file `path` describes; None without a vocabulary.

    Raises:
        CheckpointError: a kind of tokenizer that is not read.
    """
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if "tokens" not in values:
        return None
    backend, add_bos = _backend(values, path)
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(values["tokens"], values.get("token_type", ()), strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    names = {
        f"{name}_token": values["tokens"][values[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{key}_token_id" in values
    }
    bos = names.get("bos_token") if values.get("add_bos_token", add_bos) else None
    eos = names.get("eos_token") if values.get("add_eos_token", False) else None
    backend.post_processor = processors.TemplateProcessing(
        single=[part for part in (bos, "$A", eos) if part],
        special_tokens=[(token, backend.token_to_id(token)) for token in {bos, eos} if token],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **names,
    )


def _backend(values: Mapping[str, Any], path: Path) -> tuple[Tokenizer, bool]:
    """The tokenizer without its special tokens, and whether it begins with BOS unless told."""
    model, pre = values.get("model"), values.get("pre")
    if model not in _LISTS:
        raise CheckpointError(
            f"{path} has tokenizer {model!r}; those that are read: {', '.join(_LISTS)}"
        )
    if _LISTS[model] not in values:
        raise CheckpointError(
            f"{path} has tokenizer {model!r} without tokenizer.ggml.{_LISTS[model]}"
        )
    if model == "llama":
        return _sentencepiece(values), True
    if pre not in _BYTE_LEVELS:
        raise CheckpointError(
            f"{path} has pre-tokenizer {pre!r}; those that are read: {', '.join(_BYTE_LEVELS)}"
        )
    return _byte_level(values, _BYTE_LEVELS[pre]), _BYTE_LEVELS[pre].add_bos


def _byte_level(values: Mapping[str, Any], family: _ByteLevel) -> Tokenizer:
    """BPE over bytes, each byte spelled as a printable character, as GPT-2 has it."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(values["tokens"])},
            merges=[tuple(merge.split(" ")) for merge in values["merges"]],
            ignore_merges=family.whole_words,
        )
    )
    steps: list[Any] = []
    if family.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if family.split is not None:
        steps.append(pre_tokenizers.Split(Regex(family.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(values: Mapping[str, Any]) -> Tokenizer:
    """BPE over characters by score, unknown ones as bytes: SentencePiece, as in Llama 2."""
    tokens, scores = values["tokens"], values["scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for _, token in sorted(zip(scores, tokens, strict=True), key=lambda item: -item[0])
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[values.get("unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("▁")] if values.get("add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
