"""Every route of `rackmount serve`, asked by curl."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.engines import EOS, chain_checkpoint, spell
from tests.helpers.served import SMALL, START_S, Served, await_true, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

ANSWER = "caf\u00e9!"
COMPLETION = {"model": "tiny", "prompt": "A", "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Answers "A", and every chat, with `ANSWER`; its key is "secret"."""
    folder = chain_checkpoint(tmp_path_factory.mktemp("chain"), spell(ANSWER, start="A", end=EOS))
    keys = folder / "keys"
    keys.write_text("secret\n")
    with started(folder, *SMALL, "--api-key-file", str(keys)) as it:
        await_true(lambda: it.answers("/health"), START_S)
        yield it


def curl(server: Served, path: str, body: Any = None, key: str = "secret") -> tuple[int, str, str]:
    """Status, content type and text of a reply."""
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--noproxy", "*"]
    command += ["--max-time", "60", "--write-out", "\n%{http_code} %{content_type}"]
    command += ["--header", f"Authorization: Bearer {key}"] if key else []
    if body is not None:
        command += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
    done = subprocess.run([*command, server.url + path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, _, last = done.stdout.rpartition("\n")
    status, _, kind = last.partition(" ")
    return int(status), kind, text


def answered(server: Served, path: str, body: Any = None) -> Any:
    status, kind, text = curl(server, path, body)
    assert (status, kind) == (200, "application/json"), text
    return json.loads(text)


def streamed(server: Served, path: str, body: Any) -> list[Any]:
    """The events of a stream that ended well."""
    status, kind, text = curl(server, path, body | STREAMED)
    assert (status, kind.partition(";")[0]) == (200, "text/event-stream"), text
    *events, done = text.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_completion_whole_and_streamed(server: Served) -> None:
    reply = answered(server, "/v1/completions", COMPLETION)
    assert (reply["object"], reply["choices"][0]["text"]) == ("text_completion", ANSWER)
    *events, last = streamed(server, "/v1/completions", COMPLETION)
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["usage"] == reply["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_a_chat_whole_and_streamed(server: Served) -> None:
    reply = answered(server, "/v1/chat/completions", CHAT)
    message = {"role": "assistant", "content": ANSWER}
    assert (reply["object"], reply["choices"][0]["message"]) == ("chat.completion", message)
    *events, last = streamed(server, "/v1/chat/completions", CHAT)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == ANSWER
    assert last["usage"]["completion_tokens"] == len(ANSWER.encode()) + 1


def test_models_and_tokens(server: Served) -> None:
    assert [model["id"] for model in answered(server, "/v1/models")["data"]] == ["tiny"]
    assert answered(server, "/v1/models/tiny")["id"] == "tiny"
    tokens = answered(server, "/tokenize", {"prompt": ANSWER})["tokens"]
    assert bytes(tokens).decode() == ANSWER
    assert answered(server, "/detokenize", {"tokens": tokens}) == {"prompt": ANSWER}


def test_what_the_server_tells_of_itself(server: Served) -> None:
    for path in ("/health", "/ready"):
        assert answered(server, path) == {"status": "ok"}
    assert answered(server, "/server_info")["model_names"] == ["tiny"]
    status, kind, text = curl(server, "/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert "rackmount:num_requests_running{" in text


def test_an_unknown_field_is_refused_by_its_name(server: Served) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        status, _, text = curl(server, path, body | {"temprature": 1})
        error = json.loads(text)["error"]
        assert (status, error["param"]) == (400, "temprature")
        assert error["type"] == "invalid_request_error"


def test_only_health_answers_without_the_key(server: Served) -> None:
    assert curl(server, "/health", key="")[0] == 200
    for key in ("", "wrong"):
        for path, body in (
            ("/v1/completions", COMPLETION),
            ("/v1/models", None),
            ("/metrics", None),
            ("/server_info", None),
            ("/ready", None),
        ):
            status, _, text = curl(server, path, body, key)
            assert (status, json.loads(text)["error"]["type"]) == (401, "authentication_error")
