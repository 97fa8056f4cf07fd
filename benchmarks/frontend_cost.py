"""What HTTP streaming costs beside the model: a real server whose steps take no time, or as told.

Usage: python benchmarks/frontend_cost.py [--model smollm2-135m] [--clients 64] [--seconds 10]
       [--step-ms 0 10] [--profile FOLDER] [--out FILE.json]

The front end and the engine core are the real ones, each in its process; the executor is null. With
steps of no time the slowest part sets the pace: tokens a second is what the front end can stream.
With steps of `--step-ms`, which ought to be slower than the front end, CPU microseconds a token say
what it costs to keep up. A chunk may hold several tokens; both are counted. The clients are a
process of their own, which counts and parses nothing. With `--profile`, py-spy samples both
processes and leaves a file of stacks for each, and the functions with most samples are told.
"""

import argparse
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

from rackmount_tools.machine import describe_machine

HERE = Path(__file__).resolve().parent
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
PROMPT = list(range(300, 316))
MAX_TOKENS = 400
WARM_S = 3.0
COMMON = 0.97
TOP = 24
"""Functions that are told."""
METADATA = """Metadata-Version: 2.1
Name: null-executor
Version: 0
Requires-Dist: rackmount-registry>=1.0,<2
"""
"""Of the plugin beside this file, as it were installed."""
OPENER = build_opener(ProxyHandler({}))


@contextmanager
def server(model: str, clients: int, step_ms: float) -> Iterator[tuple[psutil.Process, int]]:
    """The front end's process, and its port."""
    with TemporaryDirectory() as folder:
        site, log = Path(folder), Path(folder) / "log"
        info = site / "null_executor-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA)
        (info / "entry_points.txt").write_text("[rackmount]\nnull = null_executor\n")
        command = [sys.executable, "-m", "rackmount.cli.app", "serve", model, "--port", "0"]
        command += ["--device", "cpu", "--executor", "null", "--max-num-seqs", str(clients)]
        command += ["--plugin-config", f"executor.null.step_ms={step_ms}"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(HERE), *sys.path])},
            )
        try:
            while not (found := ADDRESS.search(log.read_text())) or not ready(int(found[1])):
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)
            yield psutil.Process(process.pid), int(found[1])
        finally:
            process.terminate()
            process.wait()


def ready(port: int) -> bool:
    try:
        return bool(OPENER.open(f"http://127.0.0.1:{port}/ready").status == 200)
    except OSError:
        return False


def metric(port: int, name: str) -> float:
    with OPENER.open(f"http://127.0.0.1:{port}/metrics") as reply:
        found = re.findall(rf"^rackmount:{name}{{.*}} (\S+)$", reply.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def client(port: int, count: int, seconds: float, body: dict[str, Any]) -> int:
    """Keeps `count` streams open; gives the chunks that came after the warm-up."""
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n%s" % (len(data), data)
    selector, chunks, begin = selectors.DefaultSelector(), 0, time.monotonic()
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ)
    while (passed := time.monotonic() - begin) < WARM_S + seconds:
        for key, _ in selector.select(1):
            connection = key.fileobj  # type: ignore[assignment]
            piece = connection.recv(1 << 16)
            assert piece, "the server hung up"
            chunks += piece.count(b"data: ") * (passed > WARM_S)
            if b"[DONE]" in piece:
                connection.sendall(request)
    return chunks


def measure(
    model: str,
    clients: int,
    seconds: float,
    step_ms: float,
    body: dict[str, Any],
    profile: Path | None,
) -> dict[str, Any]:
    with server(model, clients, step_ms) as (front, port):
        (core,) = front.children()
        script = (
            f"import frontend_cost as f; print(f.client({port}, {clients}, {seconds}, {body!r}))"
        )
        crowd = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        )
        while not metric(port, "num_requests_running"):
            time.sleep(0.1)
        time.sleep(WARM_S)
        marks = [mark(port, front, core)]
        if profile:
            spy(profile, {"front end": front, "core": core}, seconds - 1, step_ms)
        else:
            time.sleep(seconds - 1)
        marks.append(mark(port, front, core))
        answer = crowd.communicate()[0]
        assert crowd.returncode == 0, "the clients failed"
    begin, end = marks
    spent = {name: end[name] - begin[name] for name in begin}
    chunks = int(answer) / seconds
    tokens = spent["tokens"] / spent["seconds"]
    return {
        "step_ms": step_ms,
        "tokens_per_s": round(tokens),
        "chunks_per_s": round(chunks),
        "tokens_per_chunk": round(tokens / chunks, 2),
        "front_us_per_token": round(spent["front"] / spent["tokens"] * 1e6, 1),
        "front_us_per_chunk": round(spent["front"] / spent["seconds"] / chunks * 1e6, 1),
        "front_cpu_share": round(spent["front"] / spent["seconds"], 2),
        "core_us_per_token": round(spent["core"] / spent["tokens"] * 1e6, 1),
        "core_cpu_share": round(spent["core"] / spent["seconds"], 2),
    }


def mark(port: int, front: psutil.Process, core: psutil.Process) -> dict[str, float]:
    """Seconds on the clock and of both processes' CPU, and tokens so far."""
    times = {name: sum(each.cpu_times()[:2]) for name, each in (("front", front), ("core", core))}
    return {"seconds": time.monotonic(), "tokens": metric(port, "generation_tokens_total"), **times}


def spy(folder: Path, processes: dict[str, psutil.Process], seconds: float, step_ms: float) -> None:
    """Samples all stacks, and tells where most samples fell: alone, and with what was called."""
    folder.mkdir(exist_ok=True)
    running = {}
    for name, process in processes.items():
        file = folder / f"{name.replace(' ', '_')}_{step_ms:g}ms.txt"
        command = ["py-spy", "record", "--pid", str(process.pid), "--format", "raw"]
        command += ["--duration", f"{seconds:.0f}", "--rate", "200", "--output", str(file)]
        running[name, file] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for (name, file), each in running.items():
        each.wait()
        print(f"\n{name}, steps of {step_ms:g} ms")
        for title, counts, total in top(file.read_text()):
            print(f"  {title}")
            for place, count in counts.most_common(TOP):
                print(f"    {count / total:6.1%} {place}")


def top(stacks: str) -> Iterator[tuple[str, Counter[str], int]]:
    """Of the main thread, without the frames that nearly all samples have in common."""
    own, within, total = Counter[str](), Counter[str](), 0
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        places = [re.sub(r":\d+\)$", ")", frame) for frame in frames.split(";")]
        if "<module>" in frames:
            own[places[-1]] += int(count)
            within.update(dict.fromkeys(places, int(count)))
            total += int(count)
    yield "alone", own, total
    inner = {place: count for place, count in within.items() if count < COMMON * total}
    yield "with what they call", Counter(inner), total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.0, 10.0])
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    rows = [
        measure(given.model, given.clients, given.seconds, each, body, given.profile)
        for each in given.step_ms
    ]
    record = {
        "machine": describe_machine("rackmount-core", "uvicorn", "fastapi", "pyzmq"),
        "model": given.model,
        "clients": given.clients,
        "rows": rows,
    }
    print(json.dumps(record, indent=2))
    if given.out:
        given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
