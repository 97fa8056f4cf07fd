"""A choice of a reply: the deltas of a stream, and what they make together."""

from typing import Any

from rackmount_server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from rackmount_server.requests import ChatRequest, CompletionRequest
from rackmount_server.service import Piece
from rackmount_server.tokens import TokenTexts
from rackmount_server.tool_calls import ToolCallParser


class CompletionChoice:
    """Of /v1/completions. `echo` is the prompt's text, which then goes before the answer."""

    def __init__(self, asked: CompletionRequest, texts: TokenTexts, echo: str | None) -> None:
        self._asked, self._texts, self._echo = asked, texts, echo
        self._logprobs = CompletionLogprobs(texts)
        self._first = True

    def delta(self, piece: Piece) -> dict[str, Any]:
        """What a stream says of the next piece."""
        number, sequence, chunk = piece
        first, self._first = self._first, False
        text, entries = chunk.text, [*(chunk.logprobs or ())]
        ids = [entry.token_id for entry in entries]
        if first and self._echo is not None:
            text = self._echo + text
            entries[:0] = sequence.prompt_logprobs
            ids[:0] = sequence.prompt_token_ids
        delta = {
            "index": number,
            "text": text,
            "logprobs": None,
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        } | _extras(self._asked, piece, self._texts, first)
        if self._asked.logprobs is not None:
            delta["logprobs"] = self._logprobs.render(ids, entries)
        return delta

    def whole(self, deltas: list[dict[str, Any]]) -> dict[str, Any]:
        """All deltas of an answer as one choice."""
        choice = _joined(deltas)
        choice["text"] = "".join(delta["text"] for delta in deltas)
        if choice["logprobs"] is not None:
            choice["logprobs"] = {
                key: [it for delta in deltas for it in delta["logprobs"][key]]
                for key in choice["logprobs"]
            }
        return choice


class ChatChoice:
    """Of /v1/chat/completions."""

    def __init__(self, asked: ChatRequest, texts: TokenTexts) -> None:
        self._asked, self._texts = asked, texts
        self._parser = ToolCallParser() if asked.offers_tools else None
        self._first = True

    def delta(self, piece: Piece) -> dict[str, Any]:
        """What a stream says of the next piece."""
        number, _, chunk = piece
        first, self._first = self._first, False
        message: dict[str, Any] = {"role": "assistant"} if first else {}
        message["content"], calls = self._parse(chunk.text, last=chunk.finish_reason is not None)
        if calls:
            message["tool_calls"] = calls
        called = chunk.finish_reason == "stop" and self._parser and self._parser.num_calls
        delta = {
            "index": number,
            "delta": message,
            "logprobs": None,
            "finish_reason": "tool_calls" if called else chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        } | _extras(self._asked, piece, self._texts, first)
        if self._asked.logprobs:
            delta["logprobs"] = chat_logprobs(chunk.logprobs or (), self._texts)
        return delta

    def whole(self, deltas: list[dict[str, Any]]) -> dict[str, Any]:
        """All deltas of an answer as one choice."""
        choice = _joined(deltas)
        messages = [choice.pop("delta"), *(delta["delta"] for delta in deltas[1:])]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        text = "".join(message["content"] for message in messages)
        choice["message"] = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            for call in calls:
                del call["index"]
            choice["message"]["tool_calls"] = calls
        if choice["logprobs"] is not None:
            logprobs = [it for delta in deltas for it in delta["logprobs"]["content"]]
            choice["logprobs"] = {"content": logprobs}
        return choice

    def _parse(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        if self._parser is None:
            return text, []
        text, calls = self._parser.push(text)
        if last:
            more_text, more_calls = self._parser.finish()
            text, calls = text + more_text, calls + more_calls
        return text, calls


def _extras(
    asked: CompletionRequest | ChatRequest, piece: Piece, texts: TokenTexts, first: bool
) -> dict[str, Any]:
    """Fields beyond OpenAI's, where they were asked for."""
    _, sequence, chunk = piece
    extras: dict[str, Any] = {}
    if asked.return_token_ids:
        extras["token_ids"] = chunk.token_ids
    if asked.prompt_logprobs is not None and first:
        extras["prompt_logprobs"] = prompt_logprobs(sequence.prompt_logprobs, texts)
    return extras


def _joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """What is the same for both routes: the first delta's fields with the last one's reasons."""
    choice, last = dict(deltas[0]), deltas[-1]
    choice |= {key: last[key] for key in ("finish_reason", "stop_reason")}
    if "token_ids" in choice:
        choice["token_ids"] = [it for delta in deltas for it in delta["token_ids"]]
    return choice
