"""What `rackmount bench serve` measures of a server whose times are known."""

import asyncio
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.helpers import fake_openai as fake
from tests.helpers.fake_openai import Script, answer, fake_openai
from typer.testing import CliRunner

from rackmount_registry.errors import ConfigError, RackmountError
from rackmount_tools.bench_serve import bench, parse_rates
from rackmount_tools.serving.arrivals import arrivals
from rackmount_tools.serving.asks import Ask, Lengths, random_asks, read_asks
from rackmount_tools.serving.drive import Target, drive
from rackmount_tools.serving.exchange import Exchange, events
from rackmount_tools.serving.figures import figures_of, parse_goals, spread

ASK = Ask(path="/v1/completions", fields={"prompt": [1, 2, 3], "max_tokens": 5})
SLACK_S = 0.15
"""By which a busy machine may be late. Nothing is ever early."""


def seen_of(script: Script, *, asks: Sequence[Ask] = (ASK,), **given: Any) -> list[Exchange]:
    with fake_openai(script) as server:
        target = Target(base_url=server.url, **given)
        return asyncio.run(drive(target, asks, [0.0] * len(asks)))


def error_of(*pieces: fake.Piece, status: int = 200, timeout_s: float = 5.0) -> Exchange:
    (seen,) = seen_of(Script(pieces=list(pieces), status=status), timeout_s=timeout_s)
    assert seen.error is not None
    return seen


def test_times_are_those_of_the_server() -> None:
    (seen,) = seen_of(answer(0.3, 0.2, 4))
    assert seen.error is None
    assert 0.3 <= seen.ttft < 0.3 + SLACK_S
    assert len(seen.gaps) == 3
    assert all(0.2 - SLACK_S < gap < 0.2 + SLACK_S for gap in seen.gaps)
    assert seen.tpot == pytest.approx(sum(seen.gaps) / 3)
    assert 0.9 <= seen.e2e < 0.9 + 2 * SLACK_S
    assert (seen.prompt_tokens, seen.output_tokens, seen.finish_reason) == (3, 4, "length")


def test_tokens_are_those_that_the_server_counts_however_many_a_chunk_holds() -> None:
    (seen,) = seen_of(answer(0.0, 0.2, 3, tokens=9))
    assert seen.output_tokens == 9 and len(seen.chunks) == 3
    assert seen.tpot == pytest.approx(sum(seen.gaps) / 8)
    assert figures_of(math.inf, [seen], {})["tokens_per_chunk"] == 3


def test_one_token_or_one_chunk_has_no_time_per_token() -> None:
    assert seen_of(answer(0.0, 0.0, 1))[0].tpot is None
    assert seen_of(answer(0.0, 0.0, 1, tokens=7))[0].tpot is None


def test_the_role_and_the_end_of_a_chat_are_no_tokens_but_one_without_text_is() -> None:
    pieces: list[fake.Piece] = [
        (0.0, fake.delta(role="assistant", content="")),
        (0.2, fake.delta(content="")),
        (0.2, fake.delta(content="b")),
        (0.0, fake.delta(tool_calls=[{}])),
        (0.2, fake.delta("stop")),
        (0.0, fake.usage(2, 3)),
        (0.0, "[DONE]"),
    ]
    chat = Ask(path="/v1/chat/completions", fields={"messages": []})
    (seen,) = seen_of(Script(pieces=pieces), asks=[chat])
    assert len(seen.chunks) == 3
    assert 0.2 <= seen.ttft < 0.2 + SLACK_S
    assert seen.e2e >= 0.6 and seen.finish_reason == "stop"


DONE: list[fake.Piece] = [(0.0, fake.usage(3, 2)), (0.0, "[DONE]")]
WORD: fake.Piece = (0.0, fake.text())


def test_every_way_not_to_answer_is_an_error_of_its_own() -> None:
    hung_up = error_of(WORD, (0.0, fake.HANG_UP))
    assert hung_up.error == "RemoteProtocolError" and len(hung_up.chunks) == 1
    assert error_of(WORD).error == "the stream ended before [DONE]"
    assert error_of(WORD, (0.0, "[DONE]")).error == "no count of tokens in the stream"
    assert error_of(*DONE).error == "no token in the stream"
    assert error_of((0.0, "{")).error == "a chunk that is not JSON"
    assert error_of((0.0, "[]")).error == "a chunk that is no object"
    refused = error_of(status=429)
    assert (refused.error, refused.error_text) == ("HTTP 429", '{"error": {"message": "no"}}')
    broken = error_of(WORD, (0.0, {"error": {"message": "died"}}), *DONE)
    assert (broken.error, broken.error_text) == ("an error in the stream", '{"message": "died"}')


def test_a_server_that_never_ends_is_left_in_time() -> None:
    begin = time.monotonic()
    seen = error_of(WORD, (60.0, fake.text()), timeout_s=0.3)
    assert seen.error == "no end within 0.3 s"
    assert seen.e2e >= 0.3 and time.monotonic() - begin < 5


def test_a_server_that_is_not_there_is_an_error() -> None:
    with fake_openai(answer(0, 0, 1)) as server:
        gone = Target(base_url=server.url)
    (seen,) = asyncio.run(drive(gone, [ASK], [0.0]))
    assert seen.error == "ConnectError"


def test_errors_are_counted_and_leave_no_times() -> None:
    scripts = [answer(0.0, 0.0, 2), Script(pieces=[], status=503), Script(pieces=[WORD])] * 4
    with fake_openai(lambda place: scripts[place]) as server:
        seen = asyncio.run(drive(Target(base_url=server.url), [ASK] * 12, [0.0] * 12))
    figures = figures_of(math.inf, seen, {"ttft": 60.0})
    assert (figures["requests"], figures["answered"]) == (12, 4)
    assert {kind: found["count"] for kind, found in figures["errors"].items()} == {
        "HTTP 503": 4,
        "the stream ended before [DONE]": 4,
    }
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (12, 8)
    assert figures["finish_reasons"] == {"length": 4}
    assert figures["good_share"] == 4 / 12
    assert figures["requests_per_s"] == 4 / figures["seconds"]


def test_a_load_without_any_answer_has_figures_too() -> None:
    figures = figures_of(1.0, [error_of(status=500)], {"ttft": 1.0})
    assert figures["ttft_ms"] is None and figures["requests_per_s"] == 0
    assert figures["goodput_per_s"] == 0 and "tokens_per_chunk" not in figures


def test_requests_are_sent_at_their_times_whatever_the_others_do() -> None:
    with fake_openai(answer(0.8, 0.0, 1)) as server:
        target = Target(base_url=server.url)
        seen = asyncio.run(drive(target, [ASK] * 4, [0.0, 0.1, 0.3, 0.6]))
    assert server.most_at_once == 4
    came = [each["at"] - server.asked[0]["at"] for each in server.asked]
    assert came == pytest.approx([0.0, 0.1, 0.3, 0.6], abs=SLACK_S)
    assert all(0 <= each.sent - each.due < SLACK_S for each in seen)


def test_no_more_requests_run_at_once_than_may_and_the_others_are_late() -> None:
    with fake_openai(answer(0.2, 0.0, 1)) as server:
        target = Target(base_url=server.url)
        seen = asyncio.run(drive(target, [ASK] * 6, [0.0] * 6, concurrency=2))
    assert server.most_at_once == 2
    late = sorted(each.sent - each.due for each in seen)
    assert late == pytest.approx([0.0, 0.0, 0.2, 0.2, 0.4, 0.4], abs=2 * SLACK_S)
    assert late[-1] >= 0.4
    assert max(each.ttft for each in seen) < 0.2 + SLACK_S  # counts from sending


def test_arrivals_have_the_rate_and_the_burstiness_that_are_asked() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        times = arrivals(20_001, 5.0, burstiness, seed=0)
        gaps = np.diff(times)
        assert times[0] == 0 and gaps.min() >= 0
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrivals(3, math.inf, 1.0, seed=0) == [0.0] * 3
    assert arrivals(9, 1.0, 1.0, seed=1) != arrivals(9, 1.0, 1.0, seed=2)


def test_poisson_arrivals_have_poisson_counts() -> None:
    counts = np.bincount(np.array(arrivals(20_000, 4.0, 1.0, seed=3)).astype(int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)


def test_percentiles_are_exact() -> None:
    figures = spread([n / 1e3 for n in range(101)])
    assert figures is not None
    expected = {"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert figures == pytest.approx(expected)
    assert spread([]) is None


def an_exchange(ttft: float, tpot: float, tokens: int = 11) -> Exchange:
    last = 1 + ttft + tpot * (tokens - 1)
    return Exchange(due=1, sent=1, chunks=[1 + ttft, last], end=last, output_tokens=tokens)


def test_goodput_counts_answers_that_meet_every_goal() -> None:
    seen = [
        an_exchange(0.4, 0.04),
        an_exchange(0.6, 0.04),
        an_exchange(0.4, 0.06),
        an_exchange(0.4, 9.0, tokens=1),
    ]
    seen[3].chunks = seen[3].chunks[:1]  # no second token, no time of it
    seen[3].end = 1.4
    figures = figures_of(2.0, seen, parse_goals(["ttft:500", "tpot:50"]))
    assert figures["good_share"] == 0.5
    assert figures["goodput_per_s"] == 2 / figures["seconds"]
    assert figures["goals_ms"] == {"ttft": 500, "tpot": 50}
    assert figures_of(2.0, seen, parse_goals(["e2e:900 ttft:450"]))["good_share"] == 0.5
    assert "good_share" not in figures_of(2.0, seen, {})


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "itl:5", ":5"])
def test_a_goal_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"must be NAME:MILLISECONDS, and NAME one of ttft, tpot"):
        parse_goals([word])


@pytest.mark.parametrize("text", ["", "0", "-1", "1,", "nan", "x"])
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be numbers above 0, or inf"):
        parse_rates(text)


def test_random_prompts_have_the_lengths_that_are_asked_and_other_seeds_other_ids() -> None:
    lengths = Lengths(input_len=10, output_len=20, spread=0.5)
    asks = random_asks(300, lengths, 50, seed=0)
    given = [len(ask.fields["prompt"]) for ask in asks]
    wanted = [ask.fields["max_tokens"] for ask in asks]
    assert (min(given), max(given)) == (5, 15)
    assert (min(wanted), max(wanted)) == (10, 30)
    assert max(max(ask.fields["prompt"]) for ask in asks) == 49
    assert asks == random_asks(300, lengths, 50, seed=0)
    assert asks[0] != random_asks(300, lengths, 50, seed=1)[0]
    even = random_asks(9, Lengths(input_len=1, output_len=3), 50, seed=0)
    assert all(len(ask.fields["prompt"]) == 1 for ask in even)


def test_a_file_of_requests_is_read_in_order_and_over_again(tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    lines = [{"prompt": "é", "max_tokens": 7}, {"messages": [{"role": "user", "content": "a"}]}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, third = read_asks(file, 3, output_len=5)
    assert first == third == Ask(path="/v1/completions", fields=lines[0])
    assert second.path == "/v1/chat/completions"
    assert second.fields == {"messages": lines[1]["messages"], "max_tokens": 5}


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"promt": "a"}', '{"prompt": 1, "messages": 2}']
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"asks.jsonl:2 must be a JSON object with prompt or"):
        read_asks(file, 1, 5)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_asks(file, 1, 5)


def test_events_are_whole_wherever_the_bytes_are_cut() -> None:
    stream = b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n'

    async def read(size: int) -> list[bytes]:
        async def pieces() -> Any:
            for at in range(0, len(stream), size):
                yield stream[at : at + size]

        return [data async for data in events(pieces())]

    for size in (1, 2, 3, 7, len(stream)):
        assert asyncio.run(read(size)) == [b'{"a": 1}', b"two", b"[DONE]"]


def run_bench(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, arguments)


def test_the_command_sweeps_rates_and_leaves_record_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    key, record, picture = tmp_path / "key", tmp_path / "record.json", tmp_path / "plot.png"
    key.write_text("secret\n")
    with fake_openai(answer(0.02, 0.01, 5)) as server:
        given = f"--num-requests 6 --input-len 4 --output-len 5 --rate 50,20,inf --json {record}"
        given += f" --plot {picture} --base-url {server.url}/v1/ --api-key-file {key}"
        given += ' --extra-body {"top_k":3} --goodput ttft:60000 tpot:0.001'
        done = run_bench(*given.split())
    assert done.exit_code == 0, (done.output, done.exception)
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(record.read_text())
    assert [row["rate"] for row in written["rates"]] == [50, 20, "inf"]
    for row in written["rates"]:
        assert (row["requests"], row["answered"], row["errors"]) == (6, 6, {})
        assert (row["prompt_tokens"], row["output_tokens"]) == (18, 30)
        assert 20 <= row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["ttft_ms"]["max"]
        assert row["goals_ms"] == {"ttft": 60000, "tpot": 0.001} and row["good_share"] == 0
    assert written["server"] == {"is": "fake"}
    assert len(server.asked) == 3 * 6 + 1  # one warms up
    prompts = [tuple(each["prompt"]) for each in server.asked]
    assert len(set(prompts)) == len(prompts)
    for each in server.asked:
        assert each["authorization"] == "Bearer secret"
        assert (each["model"], each["top_k"], each["ignore_eos"]) == ("fake", 3, True)
        assert each["stream"] is True and each["stream_options"] == {"include_usage": True}


def test_a_server_that_refuses_the_first_request_is_told_at_once() -> None:
    with fake_openai(Script(pieces=[], status=401)) as server:
        done = run_bench("--base-url", server.url, "--num-requests", "50")
    assert isinstance(done.exception, RackmountError)
    assert "does not answer the first request: HTTP 401" in str(done.exception)
    assert len(server.asked) == 1


def test_no_server_is_told_with_its_address() -> None:
    with fake_openai(answer(0, 0, 1)) as server:
        pass
    done = run_bench("--base-url", server.url)
    assert isinstance(done.exception, RackmountError)
    assert f"{server.url}/v1/models: " in str(done.exception)


def test_a_picture_of_no_rate_is_refused_before_the_load(tmp_path: Path) -> None:
    done = run_bench("--plot", str(tmp_path / "plot.png"), "--rate", "inf")
    assert isinstance(done.exception, ConfigError)
    assert "give --rate a finite one" in str(done.exception)
