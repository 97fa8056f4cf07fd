"""`rackmount bench serve` against `rackmount serve`."""

import json
from pathlib import Path

import pytest
import typer
from tests.helpers.served import SMALL, byte_checkpoint, served
from typer.testing import CliRunner

from rackmount_tools.bench_serve import bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_client_and_server_agree(tmp_path: Path) -> None:
    record, data = tmp_path / "record.json", tmp_path / "data.jsonl"
    chat = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 7}
    data.write_text(f'{{"prompt": "AB"}}\n{json.dumps(chat)}\n')
    app = typer.Typer()
    app.command()(bench)
    with served(byte_checkpoint(tmp_path / "model"), *SMALL) as server:
        common = f"--base-url {server.url} --num-requests 20 --output-len 9 --json {record}"
        for given, prompt_tokens, output_tokens in (
            ("--input-len 12 --vocab-size 256 --rate 40,inf", 20 * 12, 20 * 9),
            (f"--data {data} --rate inf --concurrency 3", 10 * (2 + 4), 10 * (9 + 7)),
        ):
            before = server.metric("generation_tokens_total")
            done = CliRunner().invoke(app, [*common.split(), *given.split()])
            assert done.exit_code == 0, (done.output, done.exception)
            rows = json.loads(record.read_text())["rates"]
            for row in rows:
                assert (row["answered"], row["errors"]) == (20, {})
                assert row["finish_reasons"] == {"length": 20}
                counts = row["prompt_tokens"], row["output_tokens"]
                assert counts == (prompt_tokens, output_tokens)
            counted = server.metric("generation_tokens_total") - before
            assert counted == len(rows) * output_tokens + 9  # one warms up
        server.await_idle()
