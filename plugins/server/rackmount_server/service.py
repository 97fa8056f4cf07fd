"""What the routes share: the engine behind its door, with every answer watched."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rackmount import Answer, AsyncEngine, Prompt, SamplingParams, TextChunk
from rackmount import Sequence as Answered
from rackmount_server.admission import RETRY_AFTER, Admission
from rackmount_server.errors import ApiError, bad_request
from rackmount_server.metrics import Metrics, Watch
from rackmount_server.requests import Generation
from rackmount_server.settings import ServerSettings
from rackmount_server.tokenizing import Tokenizing
from rackmount_server.tokens import TokenTexts


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one HTTP request asks of the engine."""

    prompts: list[list[int]]
    params: SamplingParams
    grammar_field: str | None
    """Where the grammar of `params` came from."""
    priority: int
    cache_salt: str | None
    arrived_at: float

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


Piece = tuple[int, Answered, TextChunk]
"""The number of a choice (the answers of the first prompt, then those of the second, ...), its
sequence, and a chunk of it."""

RULES = ("allowed_token_ids", "bad_words", "grammar", "min_tokens")
"""Parameters that together may leave no token to sample."""


class Service:
    """An engine that serves HTTP requests."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.started_at = int(time.time())
        self.metrics = Metrics(engine, settings.model_names[0], each_expert=settings.expert_metrics)
        self.admission = Admission(engine, settings)
        self.tokenizing = Tokenizing(engine, self.admission)
        if settings.chat_template is not None:
            self.tokenizing.tokenizer().chat_template = settings.chat_template
        self.token_texts = TokenTexts(engine.tokenizer)

    def model_name(self, asked: str | None) -> str:
        """The name to reply with.

        Raises:
            ApiError: the model is another one.
        """
        names = self.settings.model_names
        if asked is not None and asked not in names:
            text = f"model {asked!r} is not served here; served: {', '.join(names)}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return asked or names[0]

    def text_of(self, prompt: str | list[int], params: SamplingParams) -> str:
        """A prompt as it is echoed."""
        if isinstance(prompt, str):
            return prompt
        skip = params.skip_special_tokens
        return str(
            self.tokenizing.tokenizer().decode(
                prompt, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
        )

    async def task(
        self,
        asked: Generation,
        prompts: Sequence[Prompt],
        param: str,
        arrived_at: float,
        *,
        template_options: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Task:
        """Prompts, of the field `param`, are encoded. `own` are sampling parameters that go before
        what is asked."""
        defaults, limit = self.engine.default_sampling_params, self.settings.max_logprobs
        params = asked.sampling(defaults, limit, **own)
        return Task(
            prompts=await self.tokenizing.encode(
                prompts, param, n=params.n, template_options=template_options
            ),
            params=params,
            grammar_field=asked.grammar()[0],
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt,
            arrived_at=arrived_at,
        )

    async def answer(self, task: Task) -> AsyncGenerator[Piece]:
        """Answers all prompts of a task; closing it aborts what still runs.

        Raises:
            ApiError: overload, or an answer that the engine could not end.
            RackmountError: what the engine refuses, or that it died.
        """
        self.admission.check(
            num_prompts=len(task.prompts),
            n=task.params.n,
            num_tokens=task.params.n * sum(map(len, task.prompts)),
        )
        answers: list[Answer] = []
        watches: list[Watch] = []
        try:
            for ids in task.prompts:
                answers.append(self._submit(ids, task))
                for sequence in answers[-1].sequences:
                    sequence.arrived_at = task.arrived_at
                    watches.append(self.metrics.watch(sequence))
            async for number, chunk in _merged(answers):
                choice = number * task.params.n + chunk.index
                watches[choice].take(chunk)
                _check_end(chunk, task.params)
                yield choice, watches[choice].sequence, chunk
        finally:
            for watch in watches:
                watch.close()
            for answer in answers:
                await answer.aclose()

    def _submit(self, ids: list[int], task: Task) -> Answer:
        try:
            return self.engine.submit(
                ids, task.params, priority=task.priority, cache_salt=task.cache_salt
            )
        except (TypeError, ValueError) as error:
            raise bad_request(error, task.grammar_field) from error


def _check_end(chunk: TextChunk, params: SamplingParams) -> None:
    """ApiError for an answer that ended and is none."""
    if chunk.finish_reason == "error":
        rules = [name for name in RULES if getattr(params, name)]
        if rules:
            text = f"{', '.join(rules)} left no token to sample"
            if params.grammar:
                text += ", or the grammar took too long to compile"
            raise ApiError(400, text, param=rules[0], code="no_token_left")
        raise ApiError(500, "the model's output left no token to sample", code="model_failure")
    if chunk.finish_reason == "abort":
        raise ApiError(503, "the server stops", code="shutting_down", headers=RETRY_AFTER)


async def _merged(answers: list[Answer]) -> AsyncGenerator[tuple[int, TextChunk]]:
    """The chunks of all, with the number of their answer, as they come.

    Each answer is at most a chunk ahead of the reader, so that the engine's own bounds hold.
    """
    if len(answers) == 1:
        async for chunk in answers[0]:
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, TextChunk | Exception | None]] = asyncio.Queue(1)

    async def pump(number: int, answer: Answer) -> None:
        try:
            async for chunk in answer:
                await queue.put((number, chunk))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    pumps = [asyncio.ensure_future(pump(*each)) for each in enumerate(answers)]
    try:
        num_open = len(pumps)
        while num_open:
            number, item = await queue.get()
            match item:
                case None:
                    num_open -= 1
                case Exception():
                    raise item
                case _:
                    yield number, item
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
