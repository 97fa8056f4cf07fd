"""Prompts to token ids, with the errors that their senders are to see."""

import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from rackmount_registry.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A chat message: "role", "content" and whatever else the chat template reads."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids or a chat."""


def normalize_prompts(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """A list of prompts, and whether a single one was given.

    A list or tuple that is empty or begins with a str, list or tuple is a batch. Anything else is
    one prompt: a str, a list that starts with a token id or a message.
    """
    match prompts:
        case [] | [str() | list() | tuple(), *_]:
            return list(prompts), False  # type: ignore[arg-type]  # `encode` checks each row
        case _:
            return [prompts], True  # type: ignore[list-item]


def encode(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    vocab_size: int,
    max_model_len: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of one prompt.

    Text gets the special tokens that the tokenizer adds (BOS), a chat those of its template.

    Raises:
        RequestError: no token, an id outside the vocabulary, no place left for an output token, a
            malformed message, no tokenizer or no chat template where one is needed.
    """
    match prompt:
        case str():
            ids = _encode_text(prompt, _require(tokenizer))
        case [Mapping(), *_]:
            options = {"add_generation_prompt": add_generation_prompt} | dict(
                chat_template_kwargs or {}
            )
            ids = _encode_chat(prompt, _require(tokenizer), options)
        case list() | tuple():
            ids = _as_ids(prompt)
        case _:
            raise RequestError(
                f"prompt {reprlib.repr(prompt)} is of type {type(prompt).__name__}; "
                "it must be a str, a list of token ids or a list of messages"
            )
    if not ids:
        raise RequestError(f"prompt {reprlib.repr(prompt)} has no token; it needs at least one")
    if min(ids) < 0 or max(ids) >= vocab_size:
        index, value = next((i, x) for i, x in enumerate(ids) if not 0 <= x < vocab_size)
        raise RequestError(
            f"token id {value} at index {index} of the prompt is outside the vocabulary; "
            f"legal ids are 0 to {vocab_size - 1}"
        )
    if len(ids) >= max_model_len:
        raise RequestError(
            f"prompt of {len(ids)} tokens is too long: max_model_len={max_model_len}, one place "
            f"of it for output, allows at most {max_model_len - 1}"
        )
    return ids


def eos_ids(
    tokenizer: "PreTrainedTokenizerBase | None",
    generation_config: Mapping[str, Any],
    config: Mapping[str, Any],
) -> frozenset[int]:
    """All ids that end a sequence: what any of the three names, an int, a list or nothing."""
    named = [source.get("eos_token_id") for source in (generation_config, config)]
    if tokenizer is not None:
        named.append(tokenizer.eos_token_id)
    lists = [ids if isinstance(ids, list | tuple) else [ids] for ids in named]
    return frozenset(i for ids in lists for i in ids if i is not None)


def encode_bad_words(
    words: Sequence[str], tokenizer: "PreTrainedTokenizerBase | None"
) -> list[list[int]]:
    """The token sequences that write each word, with and without a space before it.

    Raises:
        RequestError: a word without a token (spaces before it do not count), no tokenizer.
    """
    sequences: list[list[int]] = []
    for index, word in enumerate(words):
        bare = word.lstrip(" ")
        spellings = [_encode_inside(text, _require(tokenizer)) for text in (bare, f" {bare}")]
        if not bare or [] in spellings:
            raise RequestError(f"bad word {word!r} at index {index} has no token; it needs one")
        sequences += spellings
    return sequences


def _encode_inside(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Ids of `text` after other text: sentencepiece puts a space before what starts a text."""
    before: list[int] = tokenizer.encode("\n", add_special_tokens=False)
    ids: list[int] = tokenizer.encode(f"\n{text}", add_special_tokens=False)
    if ids[: len(before)] == before:
        return ids[len(before) :]
    alone: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return alone


def _require(tokenizer: "PreTrainedTokenizerBase | None") -> "PreTrainedTokenizerBase":
    if tokenizer is None:
        raise RequestError("the model has no tokenizer to encode text; give lists of token ids")
    return tokenizer


def _encode_text(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can carry
        raise RequestError(f"prompt {reprlib.repr(text)} is no Unicode text: {error}") from error
    ids: list[int] = tokenizer.encode(text, verbose=False)
    return ids


def _encode_chat(
    messages: Sequence[Any], tokenizer: "PreTrainedTokenizerBase", options: Mapping[str, Any]
) -> list[int]:
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise RequestError(
                    f"message {reprlib.repr(message)} at index {index} has no {key!r} that is a "
                    "str; each message needs 'role' and 'content'"
                )
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise RequestError(
            "the tokenizer has no chat template; give the prompt as a str or token ids, "
            "or a template as chat_template_kwargs={'chat_template': ...}"
        )
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, **options
        )
    except Exception as error:  # a template is the model's own code and may raise anything
        raise RequestError(f"the chat template failed: {type(error).__name__}: {error}") from error
    return ids


def _as_ids(prompt: Sequence[Any]) -> list[int]:
    if set(map(type, prompt)) <= {int}:  # ten times as fast as a look at each
        return list(prompt)
    for index, value in enumerate(prompt):
        if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise RequestError(
                f"token id {reprlib.repr(value)} at index {index} of the prompt is of type "
                f"{type(value).__name__}; it must be an int"
            )
    return [int(value) for value in prompt]
