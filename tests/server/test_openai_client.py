"""A real server and a real engine, asked by OpenAI's own client."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from tests.helpers.engines import EOS, chain_checkpoint, spell
from tests.helpers.served import START_S, Served, await_true, started

from rackmount_registry.descriptors import GrammarBackend
from rackmount_registry.plugins import PluginManager

pytestmark = pytest.mark.timeout(240)
ANSWER = "caf\u00e9 \U0001f600!"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Answers a chat, whose prompt ends with "A", with `ANSWER`."""
    folder = chain_checkpoint(tmp_path_factory.mktemp("chain"), spell(ANSWER, start="A", end=EOS))
    flags = ("--device", "cpu", "--num-kv-blocks", "64", "--block-size", "4")
    key = tmp_path_factory.mktemp("keys") / "keys"
    key.write_text("secret\n")
    flags += ("--served-model-name", "m", "--api-key-file", str(key))
    with started(folder, *flags) as it:
        await_true(lambda: it.answers("/health"), START_S)
        yield it


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="secret", http_client=http, max_retries=0
        ) as it,
    ):
        yield it


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"model": "m", "messages": messages, "temperature": 0}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    data = [entry.bytes for entry in reply.choices[0].logprobs.content][:-1]
    assert bytes(byte for part in data for byte in part).decode() == ANSWER
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == ANSWER
    assert last.usage.completion_tokens == len(ANSWER.encode()) + 1
    assert last.usage.prompt_tokens == reply.usage.prompt_tokens


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ANSWER),
        ("\u00e9", "caf"),
        ("\U0001f600", "caf\u00e9 "),
        ("f\u00e9", "ca"),
        (["!", " "], "caf\u00e9"),
        ("nowhere", ANSWER),
    ],
)
def test_a_stream_is_the_text_that_comes_whole(
    client: openai.OpenAI, stop: object, expected: str
) -> None:
    asked = {"model": "m", "prompt": "A", "temperature": 0, "max_tokens": 64, "stop": stop}
    whole = client.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.text == expected
    assert pieces[-1].finish_reason == whole.finish_reason == "stop"


def test_extra_body_fields_reach_the_sampler(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="m", prompt="A", max_tokens=3, extra_body={"allowed_token_ids": [120], "top_k": 1}
    )
    assert reply.choices[0].text == "xxx"


def test_echoed_logprobs_are_what_lm_eval_reads(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="m", prompt=[[65, 99], [66]], max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    first, second = (choice.logprobs for choice in reply.choices)
    assert first.tokens == ["A", "c", "a"]
    assert first.token_logprobs[0] is None
    assert first.token_logprobs[1] > -0.1
    assert [max(top, key=top.get) for top in first.top_logprobs[1:]] == ["c", "a"]
    assert len(second.tokens) == 2


def test_a_cached_prefix_is_in_the_usage_and_not_across_salts(client: openai.OpenAI) -> None:
    asked = {"model": "m", "prompt": "x" * 40, "max_tokens": 1}
    cached = [
        client.completions.create(
            **asked, extra_body={"cache_salt": salt}
        ).usage.prompt_tokens_details.cached_tokens
        for salt in ("a", "a", "b")
    ]
    assert cached == [0, 36, 0]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.completions.create(model="m", prompt="A", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="A")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.completions.create(model="m", prompt="A" * 300)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"


def test_the_rack_is_told_with_reasons(server: Served) -> None:
    info = json.loads(server.request("/server_info", authorization="Bearer secret")[2])
    parts = {part["kind"]: part for part in info["description"]["parts"]}
    assert "torch (rackmount-plugins-backends" in parts["attention_backend"]["winner"]
    assert parts["attention_backend"]["why"]


def test_numbers_beyond_64_bits_are_refused(client: openai.OpenAI) -> None:
    for field in ({"seed": 2**70}, {"priority": 2**70}, {"top_k": 2**70}, {"max_tokens": 2**70}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="m", prompt="A", extra_body=field)


@pytest.mark.skipif(
    not PluginManager.discover().offers(GrammarBackend), reason="no grammar backend is mounted"
)
def test_an_answer_is_held_to_its_grammar(client: openai.OpenAI) -> None:
    asked = {"model": "m", "prompt": "A", "temperature": 0}
    for fields, expected in (
        ({"guided_choice": ["yes", "no"]}, r"yes|no"),
        ({"guided_regex": "[0-9]{3}"}, r"[0-9]{3}"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
    ):
        reply = client.completions.create(**asked, extra_body=fields).choices[0]
        assert re.fullmatch(expected, reply.text)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**asked, extra_body={"guided_regex": "("})
    assert refused.value.param == "guided_regex"


def test_equal_requests_at_once_have_answers_of_their_own(client: openai.OpenAI) -> None:
    asked = {"model": "m", "prompt": "A", "max_tokens": 20, "temperature": 0}
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: client.completions.create(**asked), range(4)))
    assert len({reply.id for reply in replies}) == 4
    assert {reply.choices[0].text for reply in replies} == {ANSWER}


@pytest.mark.parametrize("top_k", [-1, 0, 1, 5, 100_000])
def test_top_k_may_be_off_one_or_above_the_vocabulary(client: openai.OpenAI, top_k: int) -> None:
    reply = client.completions.create(
        model="m", prompt="A", max_tokens=20, temperature=0, extra_body={"top_k": top_k}
    )
    assert reply.choices[0].text == ANSWER
