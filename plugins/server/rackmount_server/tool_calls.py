"""Tool calls in the form that Hermes and Qwen models write: `<tool_call>` around a JSON object of
a name and arguments."""

import json
import uuid
from typing import Any

from rackmount_server.body import read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCallParser:
    """Tells calls from text as it comes, whatever the pieces.

    What may yet become a call is held back; what turns out not to be one is text, as it was
    written. Blanks after a call only set it apart, and are left out.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._is_inside = False
        self._after_call = False
        self._said: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text to give out, and the calls that `text` completes, each as OpenAI streams it."""
        self._held += text
        while True:
            before, tag, after = self._held.partition(CLOSE if self._is_inside else OPEN)
            if not tag:
                break
            if self._is_inside:
                self._end_call(before, CLOSE)
            else:
                self._say(before)
            self._held, self._is_inside = after, not self._is_inside
        if not self._is_inside:
            safe = len(self._held) - _overlap(self._held)
            self._say(self._held[:safe])
            self._held = self._held[safe:]
        return self._taken()

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What is still held, once, when no more text comes. A call may lack its end."""
        if self._is_inside:
            self._end_call(self._held, "")
        else:
            self._say(self._held)
        return self._taken()

    def _end_call(self, body: str, close: str) -> None:
        function = _function(body)
        if function is None:
            return self._say(OPEN + body + close)
        identity = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex[:24]}"}
        self._calls.append(identity | {"type": "function", "function": function})
        self.num_calls += 1
        self._after_call = True

    def _say(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._said.append(text)

    def _taken(self) -> tuple[str, list[dict[str, Any]]]:
        text, calls = "".join(self._said), self._calls
        self._said, self._calls = [], []
        return text, calls


def _function(body: str) -> dict[str, str] | None:
    """None for what is no call."""
    try:
        match read_json(body):
            case {"name": str(name), "arguments": dict(arguments)}:
                name.encode()  # half a surrogate is no Unicode
                # In ASCII such halves stay escapes; NaN is none, but 1e999 is infinite.
                return {"name": name, "arguments": json.dumps(arguments, allow_nan=False)}
    except (ValueError, RecursionError):
        pass
    return None


def _overlap(text: str) -> int:
    """Length of the longest end of `text` with which a call may begin."""
    sizes = range(min(len(text), len(OPEN) - 1), 0, -1)
    return next((size for size in sizes if OPEN.startswith(text[-size:])), 0)
