"""The two routes that answer prompts."""

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from rackmount_server.choices import ChatChoice, CompletionChoice
from rackmount_server.conversation import Conversation
from rackmount_server.errors import ApiError
from rackmount_server.gate import arrival
from rackmount_server.reply import EventStream, event, whole
from rackmount_server.requests import ChatRequest, CompletionRequest, StreamOptions
from rackmount_server.service import Service, Task
from rackmount_server.usage import Usage


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A task, and how its reply looks."""

    task: Task
    model: str
    prefix: str
    """Of the reply's id."""
    kind: str
    """Its "object"."""
    choice: Callable[[int], CompletionChoice | ChatChoice]
    """Makes a choice of this number."""

    def head(self) -> dict[str, Any]:
        identity = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.kind}
        return identity | {"created": int(time.time()), "model": self.model}


Prepare = Callable[[], Awaitable[Exchange]]
"""Encodes the prompts: a part of the work that ends when the client hangs up."""


def add_generation(app: FastAPI, service: Service) -> None:
    """/v1/completions and /v1/chat/completions."""

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        prepare = partial(_completion, service, asked, request)
        return await _reply(service, asked, prepare, request)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await _reply(service, asked, partial(_chat, service, asked, request), request)


async def _completion(service: Service, asked: CompletionRequest, request: Request) -> Exchange:
    model, texts = service.model_name(asked.model), asked.prompts()
    own: dict[str, Any] = {}
    if asked.echo and asked.logprobs is not None:
        own["prompt_logprobs"] = asked.logprobs
    task = await service.task(asked, texts, "prompt", arrival(request), **own)

    def choice(number: int) -> CompletionChoice:
        echo = service.text_of(texts[number // task.params.n], task.params) if asked.echo else None
        return CompletionChoice(asked, service.token_texts, echo)

    return Exchange(task=task, model=model, prefix="cmpl", kind="text_completion", choice=choice)


async def _chat(service: Service, asked: ChatRequest, request: Request) -> Exchange:
    model = service.model_name(asked.model)
    messages = chat_messages(service, asked)
    own = {"max_tokens": asked.limit(), "logprobs": asked.num_logprobs()}
    task = await service.task(
        asked,
        [messages],
        "messages",
        arrival(request),
        template_options=asked.template_options(),
        **own,
    )
    kind = "chat.completion.chunk" if asked.stream else "chat.completion"
    return Exchange(
        task=task,
        model=model,
        prefix="chatcmpl",
        kind=kind,
        choice=lambda number: ChatChoice(asked, service.token_texts),
    )


def chat_messages(service: Service, asked: Conversation) -> list[dict[str, Any]]:
    """What the chat template makes a prompt of. ApiError where there is none."""
    messages = [message.plain() for message in asked.messages]
    template = getattr(service.engine.tokenizer, "chat_template", "")
    if template is None:
        text = "the model has no chat template; ask /v1/completions with a prompt, or start the "
        raise ApiError(400, text + "server with --chat-template FILE", param="messages")
    for message in messages:
        if message["role"] == "developer" and "developer" not in str(template):
            message["role"] = "system"  # which it was once called, and as which models know it
    return messages


async def _reply(
    service: Service, asked: CompletionRequest | ChatRequest, prepare: Prepare, request: Request
) -> Response:
    if not asked.stream:
        return await whole(request, _whole(service, prepare))
    if asked.prompt_logprobs is not None:
        text = "'prompt_logprobs' is not supported with stream=true; leave one of them out"
        raise ApiError(400, text, param="prompt_logprobs")
    return EventStream(_events(service, prepare, asked.stream_options or StreamOptions()))


async def _whole(service: Service, prepare: Prepare) -> dict[str, Any]:
    exchange = await prepare()
    task, usage = exchange.task, Usage(exchange.task.prompts)
    choices = [exchange.choice(number) for number in range(task.num_choices)]
    deltas: list[list[dict[str, Any]]] = [[] for _ in choices]
    async with aclosing(service.answer(task)) as pieces:
        async for piece in pieces:
            usage.take(piece)
            deltas[piece[0]].append(choices[piece[0]].delta(piece))
    made = [choice.whole(said) for choice, said in zip(choices, deltas, strict=True)]
    return exchange.head() | {"choices": made, "usage": usage.plain()}


async def _events(
    service: Service, prepare: Prepare, options: StreamOptions
) -> AsyncGenerator[bytes]:
    exchange = await prepare()
    task, usage, head = exchange.task, Usage(exchange.task.prompts), exchange.head()
    choices = [exchange.choice(number) for number in range(task.num_choices)]
    if options.include_usage:
        head["usage"] = None
    async with aclosing(service.answer(task)) as pieces:
        async for piece in pieces:
            usage.take(piece)
            if options.continuous_usage_stats:
                head["usage"] = usage.plain()
            yield event(head | {"choices": [choices[piece[0]].delta(piece)]})
    if options.include_usage:
        yield event(head | {"choices": [], "usage": usage.plain()})
