"""What a chat template makes a prompt of: messages, tools and options."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rackmount_server.body import Fields, Unsupported, read_json
from rackmount_server.errors import ApiError


class TextPart(Fields):
    type: Literal["text"]
    text: str


NULLS = {"refusal", "annotations", "audio", "function_call"}
"""Fields of a message that no template is given."""


class FunctionCall(Fields):
    name: str
    arguments: str


class ToolCall(Fields):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """What OpenAI's protocol names, and what chat templates read beside it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    # Names that templates have for what a model thought before it said `content`.
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    # Of a reply that OpenAI's client hands back.
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, or tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """As templates read it: one text, and arguments of calls as objects."""
        message = self.model_dump(exclude_unset=True, exclude=NULLS)
        if not isinstance(self.content, str):
            message["content"] = "\n".join(part.text for part in self.content or ())
        for call in message.get("tool_calls") or ():
            try:
                call["function"]["arguments"] = read_json(call["function"]["arguments"])
            except ValueError as error:
                text = f"a tool call's arguments are no JSON: {error}"
                raise ApiError(400, text, param="messages") from error
        return message


class Function(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: Literal[False] | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class Conversation(Fields):
    """What a chat template makes a prompt of."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def template_options(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        options: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if taken := RESERVED.intersection(options):
            text = f"chat_template_kwargs may not set {min(taken)!r}"
            raise ApiError(400, text, param="chat_template_kwargs")
        if self.offers_tools:
            options["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        if self.continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        return options


RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("documents", "max_length", "padding", "processor_kwargs", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)
"""Arguments of `apply_chat_template` itself: no variables of a template."""
