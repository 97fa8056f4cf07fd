"""Text to token ids and back, beside the event loop."""

import asyncio
import reprlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rackmount import AsyncEngine, Prompt
from rackmount_server.admission import Admission
from rackmount_server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class Tokenizing:
    """A thread that tokenizes: long prompts hold up no stream.

    What would wait for it passes `admission` first, and is refused where it cannot fit.
    """

    def __init__(self, engine: AsyncEngine, admission: Admission) -> None:
        self._engine, self._admission = engine, admission
        self._thread = ThreadPoolExecutor(1, "tokenizing")
        vocabulary = () if engine.tokenizer is None else engine.tokenizer.get_vocab()
        self._longest = max(map(len, vocabulary), default=1)
        """Characters of the longest token; those of byte-level vocabularies stand for bytes."""

    async def encode(
        self,
        prompts: Sequence[Prompt],
        param: str,
        *,
        n: int = 1,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Token ids of each prompt, as the engine makes them.

        Args:
            param: the field that errors name.
            n: answers to each, which are admitted with it.

        Raises:
            ApiError: a prompt that the engine refuses, or a request that is not let in.
        """
        size = 0
        for prompt in prompts:
            is_ids = not isinstance(prompt, str) and not isinstance(next(iter(prompt), 0), Mapping)
            size += len(prompt) if is_ids else self._size([prompt, template_options or {}], param)
        with self._admission.encoding(size=size, num_prompts=len(prompts), n=n):
            try:
                return [
                    await self._run(
                        partial(self._engine.encode, prompt, chat_template_kwargs=template_options)
                    )
                    for prompt in prompts
                ]
            except ValueError as error:
                raise bad_request(error, param) from error

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text, one of no token included. ApiError as for `encode`."""
        tokenizer, size = self.tokenizer(), self._size(text, "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"prompt {reprlib.repr(text)} is no Unicode text: {error}"
            raise ApiError(400, what, param="prompt") from error
        call = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens, verbose=False)
        with self._admission.encoding(size=size):
            return await self._run(call)

    async def detokenize(self, ids: list[int]) -> str:
        """The text of ids, special tokens included. ApiError for more than a prompt may have, and
        as for `encode`."""
        vocab_size, most = self._engine.model_info.vocab_size, self._engine.model_info.max_model_len
        if len(ids) > most:
            text = f"{len(ids)} ids are too many; max_model_len={most} are taken"
            raise ApiError(400, text, param="tokens")
        if any(not 0 <= token_id < vocab_size for token_id in ids):
            raise ApiError(400, f"ids must be in 0 to {vocab_size - 1}", param="tokens")
        call = partial(self.tokenizer().decode, ids, clean_up_tokenization_spaces=False)
        with self._admission.encoding(size=len(ids)):
            return str(await self._run(call))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """ApiError where the model has none."""
        if self._engine.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer: it takes token ids, and gives no text")
        return self._engine.tokenizer

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _size(self, given: Any, param: str) -> int:
        """Bytes of all text in `given`, and one for each other value.

        Raises:
            ApiError: so much text that max_model_len tokens, were each the longest, hold less.
        """
        num_chars = num_bytes = 0
        left = [given]
        while left:
            match left.pop():
                case str(text):
                    num_chars += len(text)
                    num_bytes += len(text.encode(errors="replace"))
                case Mapping() as fields:
                    left += [*fields.keys(), *fields.values()]
                case list() | tuple() as values:
                    left += values
                case _:
                    num_bytes += 1
        limit = self._engine.model_info.max_model_len
        if num_chars > limit * self._longest:
            raise ApiError(
                400,
                f"text of {num_chars} characters is too long: max_model_len={limit} tokens, of at "
                f"most {self._longest} characters each, hold at most {limit * self._longest}",
                param=param,
            )
        return num_bytes
