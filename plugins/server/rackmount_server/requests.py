"""The bodies of all routes.

Fields named as in `SamplingParams` mean the same there, where their ranges are checked.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Tag, model_validator

from rackmount import SamplingParams
from rackmount_server.body import Fields, Ids, Rows, Texts, Unsupported
from rackmount_server.conversation import Conversation
from rackmount_server.errors import SAMPLING_NAMES, ApiError, bad_request
from rackmount_server.guidance import Guided


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """The usage so far in every event, not only in one at the end."""


class Generation(Guided):
    """Fields of both ways to ask for text."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # These cannot change the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _streams_as_asked(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' needs stream=true", param="stream_options")
        return self

    def sampling(self, defaults: SamplingParams, max_logprobs: int, **own: Any) -> SamplingParams:
        """The parameters: `own` before what the request says before `defaults`.

        Raises:
            ApiError: a value that breaks a rule; the field is named.
        """
        given: dict[str, Any] = {
            name: getattr(self, name, None) for name in SAMPLING_NAMES - {"grammar"}
        }
        given |= {"logit_bias": self._bias(), "grammar": self.grammar()[1]} | own
        for name in ("logprobs", "prompt_logprobs"):
            if (given[name] or 0) > max_logprobs:
                rule = f"this server gives at most {max_logprobs}"
                raise ApiError(400, f"{name}={given[name]} is too many; {rule}", param=name)
        try:
            return replace(defaults, **{k: v for k, v in given.items() if v is not None})
        except (TypeError, ValueError) as error:
            raise bad_request(error) from error

    def _bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        try:
            return {int(key): value for key, value in self.logit_bias.items()}
        except ValueError as error:
            text = f"logit_bias has a key that is no token id: {error}"
            raise ApiError(400, text, param="logit_bias") from error


class CompletionRequest(Generation):
    prompt: str | Texts | Ids | Rows
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Unsupported = None
    best_of: Unsupported = None

    def prompts(self) -> list[str | list[int]]:
        """One or more."""
        several = isinstance(self.prompt, list) and isinstance(
            next(iter(self.prompt), 0), str | list
        )
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]


class ChatRequest(Conversation, Generation):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: Literal[True] | None = None
    functions: Unsupported = None
    function_call: Unsupported = None

    def limit(self) -> int | None:
        """Under either of its names."""
        old, new = self.max_tokens, self.max_completion_tokens
        if None not in (old, new) and old != new:
            text = f"max_completion_tokens={new} and max_tokens={old} differ; give one"
            raise ApiError(400, text, param="max_completion_tokens")
        return old if new is None else new

    def num_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "'top_logprobs' needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeText(Fields):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(Conversation):
    model: str | None = None
    return_token_strs: bool = False


def _kind(body: Any) -> str:
    has_messages = isinstance(body, dict) and "messages" in body
    return (TokenizeChat if has_messages else TokenizeText).__name__


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag(TokenizeText.__name__)]
    | Annotated[TokenizeChat, Tag(TokenizeChat.__name__)],
    Discriminator(_kind),
]


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Ids
