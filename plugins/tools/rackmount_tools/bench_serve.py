"""`rackmount bench serve`: what clients see of a server with the OpenAI interface.

Requests are sent at their times whatever has become of those before (an open loop), unless
`--concurrency` holds them back; then "late" says by how much. TTFT is from sending a request to the
first chunk with text; ITL the time between two such chunks; TPOT the time from the first to the
last of them by the tokens after the first, which the server counts; end-to-end until the stream is
over. A request that is not answered whole is an error, and only counted.
"""

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rackmount import unfold
from rackmount_registry.errors import ConfigError, RackmountError
from rackmount_registry.plain import as_plain
from rackmount_tools.record import JsonFile, print_table, writable, write_record
from rackmount_tools.serving.arrivals import arrivals
from rackmount_tools.serving.asks import Ask, Lengths, random_asks, read_asks
from rackmount_tools.serving.drive import Target, drive, first_model, server_info
from rackmount_tools.serving.figures import PERCENTILES, figures_of, parse_goals
from rackmount_tools.serving.plot import plot, require_plot

LOAD_COLUMNS = {
    "rate": "asked req/s",
    "requests_per_s": "answered req/s",
    "num_errors": "errors",
    "output_tokens_per_s": "out tok/s",
    "late": "late ms p99",
    "goodput_per_s": "good req/s",
    "good_share": "good",
}
TIMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "end-to-end"}
TIME_COLUMNS = {"rate": "asked req/s", "time": "ms", "mean": "mean"} | {
    key: key for key in (*(f"p{p}" for p in PERCENTILES), "max")
}


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where requests go, and what all of them ask."""

    base_url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="The server's first if not given.")] = None
    api_key_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Holds the server's key.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option(help="Answers reach their length.")] = True
    extra_body: Annotated[str, typer.Option(help="More fields of each request, as JSON.")] = "{}"
    timeout_s: Annotated[float, typer.Option(min=0.1, help="For a whole answer.")] = 600.0

    def target(self) -> Target:
        """Without the model's name."""
        ignore_eos = {"ignore_eos": True} if self.ignore_eos else {}
        return Target(
            base_url=self.base_url.rstrip("/").removesuffix("/v1"),
            api_key=self.api_key_file.read_text().strip() if self.api_key_file else None,
            timeout_s=self.timeout_s,
            fields={"temperature": 0} | ignore_eos | parse_fields(self.extra_body),
        )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What is asked, and when."""

    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSONL of prompt or messages, and max_tokens; random ids if not given.",
        ),
    ] = None
    num_requests: Annotated[int, typer.Option(min=1, help="At each rate.")] = 200
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of random prompts.")] = 512
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128
    spread: Annotated[
        float, typer.Option(min=0, max=1, help="Random lengths differ by up to this share.")
    ] = 0.0
    vocab_size: Annotated[int, typer.Option(min=1, help="Random ids are below.")] = 1000
    rate: Annotated[str, typer.Option(help="Requests per second, with commas; inf.")] = "inf"
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="Gamma shape of the time between two; 1 is Poisson.")
    ] = 1.0
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most at once.")] = None
    seed: Annotated[int, typer.Option(help="Of lengths, ids and times.")] = 0

    def asks(self, count: int, place: int) -> list[Ask]:
        """Those of the rate at `place`. Random ones are new at every rate, so that no prefix is
        known."""
        if self.data is not None:
            return read_asks(self.data, count, self.output_len)
        lengths = Lengths(input_len=self.input_len, output_len=self.output_len, spread=self.spread)
        return random_asks(count, lengths, self.vocab_size, self.seed + place)

    async def measure(
        self, target: Target, rates: list[float], goals: dict[str, float]
    ) -> list[dict[str, Any]]:
        """Figures of each rate, one after another."""
        await _warm_up(target, self.asks(1, len(rates)))
        rows = []
        for place, rate in enumerate(rates):
            times = arrivals(self.num_requests, rate, self.burstiness, self.seed + place)
            asks = self.asks(self.num_requests, place)
            rows.append(figures_of(rate, await drive(target, asks, times, self.concurrency), goals))
        return rows


@unfold
def bench(
    more_goals: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME:MS]...", help="Goals beside that of --goodput."),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Count requests within goals in ms: --goodput ttft:500 tpot:50."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", callback=writable, help="PNG of latency against rate."),
    ] = None,
    json_file: JsonFile = None,
    *,
    server: ServerOptions,
    load: LoadOptions,
) -> None:
    """Latency and throughput of a running server, at one rate of requests or several."""
    rates, goals = parse_rates(load.rate), parse_goals([*(goodput or ()), *(more_goals or ())])
    if plot_file is not None:
        require_plot(rates)

    async def run() -> tuple[Target, Any, list[dict[str, Any]]]:
        target = server.target()
        name = server.model or await first_model(target)
        target = replace(target, fields={"model": name} | target.fields)
        return target, await server_info(target), await load.measure(target, rates, goals)

    target, info, rows = asyncio.run(run())
    title = f"{target.fields['model']}: {load.num_requests} requests at each rate"
    _print(title, rows)
    if plot_file is not None:
        plot(plot_file, title, rows)
    loads = as_plain(load) | {"data": load.data and str(load.data)}
    asked = {"base_url": target.base_url, "fields": target.fields, "load": loads}
    write_record(json_file, asked | {"server": info, "rates": rows})


def parse_rates(text: str) -> list[float]:
    """Requests per second, of a list with commas."""
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(each > 0 for each in rates):
        raise ConfigError(f"rate={text!r} must be numbers above 0, or inf, with commas in between")
    return rates


def parse_fields(text: str) -> dict[str, Any]:
    """Fields of a body, of JSON."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"extra_body={text!r} must be a JSON object")
    return fields


async def _warm_up(target: Target, asks: list[Ask]) -> None:
    """One request that does not count; it shows what would be wrong with all."""
    (seen,) = await drive(target, asks, [0.0])
    if seen.error is not None:
        raise RackmountError(
            f"{target.base_url} does not answer the first request: {seen.error} {seen.error_text}"
        )


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    """What was answered, how long it took, and what went wrong."""
    loads = [
        row
        | {"num_errors": sum(found["count"] for found in row["errors"].values())}
        | {"late": row["late_ms"]["p99"]}
        for row in rows
    ]
    columns = {key: name for key, name in LOAD_COLUMNS.items() if any(key in row for row in loads)}
    print_table(title, columns, loads)
    times = [
        {"rate": row["rate"], "time": name, **row[key]}
        for row in rows
        for key, name in TIMES.items()
        if row[key]
    ]
    print_table(f"{title}, times", TIME_COLUMNS, times)
    for row in rows:
        for kind, found in row["errors"].items():
            typer.echo(f"at {row['rate']}/s, {found['count']} x {kind} {found['first'][:200]}")
