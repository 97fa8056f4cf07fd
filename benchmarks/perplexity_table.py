"""What rounding costs: the perplexity of a model on one text, for each way to round weights or the
KV cache.

Usage: python benchmarks/perplexity_table.py [--model smollm2-135m] [--device cpu] [--max-tokens N]
       [--only NAME ...] [--group-size 64] [--out FILE.json]

Rounded models are made by `rackmount calibrate`, with tests/assets/text/alice-1-2.txt as its data,
and read alice-3-12.txt in windows of 1024 tokens with nothing in common. Rows differ by nothing
else, so that what one loses against bfloat16 is no matter of chance. Weights are rounded to
nearest; where a kernel leaves the inputs of products as they are, as on a CPU, only weights are.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rackmount import Engine, EngineConfig
from rackmount_registry.plugins import PluginManager
from rackmount_tools.calibration import Calibration, write_calibrated
from rackmount_tools.machine import describe_machine
from rackmount_tools.perplexity import Perplexity, measure_perplexity
from rackmount_tools.record import describe_card, describe_rack

TEXTS = Path(__file__).parents[1] / "tests" / "assets" / "text"
CONTEXT = 1024


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    calibration: Mapping[str, Any] | None = None
    """None: the model as it is."""
    engine: Mapping[str, Any] = field(default_factory=dict)


def rows_of(group_size: int) -> list[Row]:
    """The plain model first."""
    weights = ("fp8-tensor", "fp8", "fp8-block", "int8", "int4", "int4-asym")
    return [
        Row(name="bfloat16"),
        *(
            Row(
                name=f"{how} g{group_size}" if how.startswith("int4") else how,
                calibration={
                    "weights": how,
                    "kv_scales": "none",
                    "group_size": group_size if how.startswith("int4") else None,
                },
            )
            for how in weights
        ),
        Row(
            name="fp8, inputs static",
            calibration={"weights": "fp8", "activations": "static", "kv_scales": "none"},
        ),
        Row(name="fp8 while loading", engine={"quantization": "fp8"}),
        Row(name="fp8 KV, scale 1.0", engine={"kv_cache_dtype": "fp8", "kv_scale": 1.0}),
        Row(name="fp8 KV, a scale a layer", calibration={"kv_scales": "tensor"}),
        Row(name="fp8 KV, a scale a head", calibration={"kv_scales": "head"}),
        Row(name="fp8 KV a head, keys mapped", calibration={"kv_scales": "head", "key_maps": True}),
        Row(name="fp8, fp8 KV a head", calibration={"weights": "fp8", "kv_scales": "head"}),
    ]


def measure(
    row: Row, args: argparse.Namespace, manager: PluginManager
) -> tuple[Perplexity, Mapping[str, Any]]:
    """And what was mounted."""
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if row.calibration is not None:
            config = EngineConfig.create(
                model=model,
                dtype="bfloat16",
                device=args.device,
                max_model_len=CONTEXT,
                kv_cache_dtype="model",
            )
            model = f"{folder}/model"
            text = (TEXTS / "alice-1-2.txt").read_text(encoding="utf-8")
            write_calibrated(
                config, Path(model), Calibration(**row.calibration), manager, text=text
            )
        arguments = {
            "dtype": "bfloat16",
            "device": args.device,
            "max_model_len": CONTEXT + 1,
            "enable_prefix_caching": False,
            **row.engine,
        }
        with Engine(model, manager=manager, **arguments) as engine:
            found = measure_perplexity(
                engine,
                (TEXTS / "alice-3-12.txt").read_text(encoding="utf-8"),
                context=CONTEXT,
                stride=CONTEXT,
                max_tokens=args.max_tokens,
            )
            return found, describe_rack(engine.rack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--group-size", type=int, default=64, help="of int4")
    parser.add_argument("--only", nargs="+", help="rows, beside the first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    manager = PluginManager.discover()
    plain, *others = rows_of(args.group_size)
    table: dict[str, dict[str, Any]] = {}
    for row in (plain, *(each for each in others if args.only is None or each.name in args.only)):
        found, mounted = measure(row, args, manager)
        first = next(iter(table.values()), {"perplexity": found.perplexity})
        change = found.perplexity / first["perplexity"] - 1
        table[row.name] = {
            "perplexity": found.perplexity,
            "change": change,
            "bits_per_byte": found.bits_per_byte,
            "parts": mounted["parts"],
        }
        print(f"{row.name:>24}: {found.perplexity:.4f} ({change:+.2%})", flush=True)
    if args.out:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine("rackmount-core") | describe_card(),
            "tokens": found.num_tokens,
            "context": CONTEXT,
            "rows": table,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
