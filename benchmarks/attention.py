"""Paged attention backends on this GPU: decoding in TB/s of keys and values, prefill in TFLOP/s.

Usage: python benchmarks/attention.py [--backends triton,flash-attn,flashinfer,torch]
       [--cases decode,prefill] [--block-size 16] [--kv-dtype fp8] [--tune] [--out FILE.json]

Decoding is timed as an engine runs it: one static step captured in a CUDA graph, as many layers,
each with a cache of its own, as make the cache four times the L2. Prefill is launched layer by
layer. A time is the median of several rounds. Bytes are the keys and values that must be read;
operations are those of the pairs that causality leaves. `--tune` times the triton backend alone
with other tiles than its own.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from rackmount_backends.plugin import attention_backends
from rackmount_backends.triton_attention import backend as triton_backend
from rackmount_backends.triton_attention.tiles import DecodeTiles, PrefillTiles
from rackmount_registry.attention import (
    FP8,
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionParams,
    DeviceTables,
    KVScales,
)
from rackmount_registry.offers import import_attribute
from rackmount_tools.ceilings import measure_ceilings
from rackmount_tools.machine import describe_machine

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
KV_DTYPES = {"bfloat16": DTYPE, "fp8": FP8}
MAX_MODEL_LEN, MAX_NUM_SEQS = 40960, 512
ROTATED_BYTES = 240 << 20
MAX_LAYERS = 64
ROUNDS = 9
ROUND_US = 10_000
"""A round repeats the layers until it takes about so long."""

LLAMA = AttentionParams(num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5)
QWEN = AttentionParams(num_heads=16, num_kv_heads=8, head_size=128, scale=128**-0.5)
ONE_RANK_OF_EIGHT = AttentionParams(num_heads=8, num_kv_heads=1, head_size=128, scale=128**-0.5)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A step: of each request the tokens that are new and all its tokens."""

    params: AttentionParams
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def num_bytes(self, kv_dtype: torch.dtype) -> int:
        """Keys and values of all tokens."""
        p = self.params
        return 2 * sum(self.seq_lens) * p.num_kv_heads * p.head_size * kv_dtype.itemsize

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of both products."""
        pairs = sum(
            n * (m - n) + n * (n + 1) // 2
            for n, m in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 4 * pairs * self.params.num_heads * self.params.head_size


def decoding(params: AttentionParams, *seq_lens: int) -> Load:
    return Load(params=params, query_lens=(1,) * len(seq_lens), seq_lens=seq_lens)


def prefilling(params: AttentionParams, *chunks: tuple[int, int]) -> Load:
    """Chunks of so many tokens at the end of so many."""
    query_lens, seq_lens = zip(*chunks, strict=True)
    return Load(params=params, query_lens=query_lens, seq_lens=seq_lens)


RAGGED = tuple(np.random.default_rng(0).integers(100, 8192, 64).tolist())
DECODE = {
    **{f"llama 1 x {n}": decoding(LLAMA, n) for n in (1024, 4096, 8192, 32768)},
    "llama 4 x 4096": decoding(LLAMA, *[4096] * 4),
    "llama 16 x 4096": decoding(LLAMA, *[4096] * 16),
    "llama 64 x 4096": decoding(LLAMA, *[4096] * 64),
    "llama 64 x 8192": decoding(LLAMA, *[8192] * 64),
    "llama 256 x 1000": decoding(LLAMA, *[1000] * 256),
    "llama 64 ragged": decoding(LLAMA, *RAGGED),
    "llama 63 x 1000 + 32768": decoding(LLAMA, *[1000] * 63, 32768),
    "qwen3-0.6b 1 x 1024": decoding(QWEN, 1024),
    "qwen3-0.6b 256 x 1000": decoding(QWEN, *[1000] * 256),
    "one rank of 8, 64 x 4096": decoding(ONE_RANK_OF_EIGHT, *[4096] * 64),
}
PREFILL = {
    "llama 16 x 1024": prefilling(LLAMA, *[(1024, 1024)] * 16),
    "llama 4 x 4096": prefilling(LLAMA, *[(4096, 4096)] * 4),
    "llama 1 x 16384": prefilling(LLAMA, (16384, 16384)),
    "llama 2048 of 32768": prefilling(LLAMA, (2048, 32768)),
    "llama 64 x 100": prefilling(LLAMA, *[(100, 100)] * 64),
    "qwen3-0.6b 16 x 1024": prefilling(QWEN, *[(1024, 1024)] * 16),
    "llama mixed": prefilling(LLAMA, *[(1, 2048)] * 64, (1024, 1024)),
}

DECODE_TILES = [
    DecodeTiles(block_n=block_n, num_warps=num_warps, num_stages=num_stages)
    for block_n, num_warps, num_stages in (
        (32, 2, 3), (32, 4, 4), (32, 4, 5), (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3),
        (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3),
    )
]  # fmt: skip
PREFILL_TILES = [
    PrefillTiles(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
    for block_m, block_n, num_warps, num_stages in (
        (128, 32, 4, 2), (128, 32, 4, 3), (128, 32, 4, 4), (128, 32, 8, 3), (128, 64, 8, 2),
        (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 128, 4, 2), (256, 32, 8, 3),
    )
]  # fmt: skip


class Step:
    """A load on a backend: its batch, and a cache and queries for each of several layers."""

    def __init__(
        self, load: Load, backend: AttentionBackend, block_size: int, kv_dtype: torch.dtype
    ) -> None:
        self.load, self.backend = load, backend
        rng = np.random.default_rng(0)
        needs = [-(-n // block_size) for n in load.seq_lens]
        ids = rng.permutation(sum(needs)).astype(np.int32)
        table = np.zeros((len(needs), MAX_MODEL_LEN // block_size), np.int32)
        for row, part in zip(table, np.split(ids, np.cumsum(needs)[:-1]), strict=True):
            row[: len(part)] = part
        query_start_loc = np.cumsum([0, *load.query_lens], dtype=np.int32)
        seq_lens = np.array(load.seq_lens, np.int32)
        self.decodes = max(load.query_lens) == 1
        self.batch = AttentionBatch(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            rows=np.arange(len(needs), dtype=np.int32),
            block_table=table,
            on_device=DeviceTables(
                query_start_loc=torch.from_numpy(query_start_loc).to(DEVICE),
                seq_lens=torch.from_numpy(seq_lens).to(DEVICE),
                block_table=torch.from_numpy(table).to(DEVICE),
            ),
            is_static=self.decodes,
        )
        p, tokens = load.params, sum(load.query_lens)
        num_layers = min(MAX_LAYERS, max(2, -(-ROTATED_BYTES // load.num_bytes(kv_dtype))))
        slots = sum(needs) * block_size
        self.layers = [
            (
                torch.randn(tokens, p.num_heads, p.head_size, dtype=DTYPE, device=DEVICE),
                torch.randn(2, slots, p.num_kv_heads, p.head_size, dtype=DTYPE, device=DEVICE).to(
                    kv_dtype
                ),
            )
            for _ in range(num_layers)
        ]
        one = torch.ones(p.num_kv_heads, device=DEVICE)
        self.scales = KVScales(k=one, v=one) if kv_dtype == FP8 else None

    def run(self) -> list[Tensor]:
        """All layers once, planned anew unless they are static."""
        return self.attend(self.backend.plan(self.batch))

    def attend(self, plan: Any) -> list[Tensor]:
        params = self.load.params
        return [self.backend.run(q, kv, plan, params, self.scales) for q, kv in self.layers]

    def microseconds(self, captured: bool) -> float:
        """Of one layer; `captured`, for a step of a backend that is graph-safe."""
        run: Callable[[], object] = self.run
        run()
        torch.cuda.synchronize()
        if captured:
            plan = self.backend.plan(self.batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.attend(plan)
            run = graph.replay
        repeats = max(1, round(ROUND_US / elapsed_us(run, 2)))
        return statistics.median(elapsed_us(run, repeats) for _ in range(ROUNDS)) / len(self.layers)


def elapsed_us(run: Callable[[], object], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def context_of(load: Load, block_size: int, kv_dtype: torch.dtype) -> AttentionContext:
    return AttentionContext(
        layers=frozenset({load.params}),
        block_size=block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=16384,
        max_model_len=MAX_MODEL_LEN,
        device=DEVICE,
        dtype=DTYPE,
        kv_dtype=kv_dtype,
    )


def measure(name: str, load: Load, block_size: int, kv_dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of a layer, and the rate that it reaches."""
    descriptor = next(each for each in attention_backends() if each.name == name)
    factory = import_attribute(descriptor.factory, f"attention backend {name}")
    step = Step(load, factory(context_of(load, block_size, kv_dtype)), block_size, kv_dtype)
    captured = step.decodes and descriptor.graph_safe
    us = step.microseconds(captured)
    if step.decodes:
        return {"us": round(us, 2), "TB/s": round(load.num_bytes(kv_dtype) / us / 1e6, 3)}
    return {"us": round(us, 1), "TFLOP/s": round(load.num_operations / us / 1e6, 1)}


@contextmanager
def tiled(tiles: DecodeTiles | PrefillTiles) -> Iterator[None]:
    """The triton backend with these tiles for everything."""
    name = "decode_tiles" if isinstance(tiles, DecodeTiles) else "prefill_tiles"
    with patch.object(triton_backend, name, lambda *_: tiles):
        yield


def figures_of(load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """By backend, or by tiles; what fails says how."""
    figures: dict[str, Any] = {}
    if not args.tune:
        for name in args.backends.split(","):
            figures[name] = attempt(name, load, args)
        return figures
    decodes = max(load.query_lens) == 1
    for tiles in DECODE_TILES if decodes else PREFILL_TILES:
        label = " ".join(str(value) for value in asdict(tiles).values())
        with tiled(tiles):
            figures[label] = attempt("triton", load, args)
    return figures


def attempt(name: str, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    try:
        return measure(name, load, args.block_size, KV_DTYPES[args.kv_dtype])
    except Exception as error:  # a vendor's, or of tiles that do not fit: others count
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        torch.cuda.empty_cache()


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line for each case: microseconds and rate of each backend, or of the five best tiles."""
    lines = []
    for case, figures in results.items():
        ranked = sorted(figures.items(), key=lambda item: item[1].get("us", float("inf")))
        parts = []
        for name, figure in ranked[:5]:
            shown = [f"{value:g} {unit}" for unit, value in figure.items() if unit != "error"]
            parts.append(f"{name}: {', '.join(shown) or 'failed'}")
        lines.append(f"{case:32} {' | '.join(parts)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--backends", default="triton,flash-attn,flashinfer,torch")
    parser.add_argument("--cases", default="decode,prefill", help="any of decode,prefill")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), default="bfloat16")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = {
        f"{kind} {name}": load
        for kind, loads in (("decode", DECODE), ("prefill", PREFILL))
        if kind in args.cases.split(",")
        for name, load in loads.items()
        if args.only in name
    }
    ceilings = measure_ceilings(DEVICE, DTYPE)
    results: dict[str, dict[str, Any]] = {}
    for name, load in cases.items():
        results[name] = figures_of(load, args)
        print(name, json.dumps(results[name]), flush=True)
    machine = describe_machine("torch", "triton") | {"device": torch.cuda.get_device_name()}
    reached = {"TB/s": ceilings.bandwidth / 1e12, "TFLOP/s": ceilings.matmul / 1e12}
    summary = {
        "machine": machine,
        "block_size": args.block_size,
        "kv_dtype": args.kv_dtype,
        "ceilings": {unit: round(value, 2) for unit, value in reached.items()},
        "results": results,
    }
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\nceilings {summary['ceilings']}, page {args.block_size}, {args.kv_dtype} KV")
    print(table(results))


if __name__ == "__main__":
    main()
