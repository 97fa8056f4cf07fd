"""What rounding its weights costs a mixture of experts: perplexity of tests/assets/tiny-moe.

Usage: python benchmarks/moe_perplexity.py [--device cpu] [--tokens N] [--out FILE.json]

The text is the checkpoint's held-out.txt, read in disjoint windows of 512 tokens. Rows are the
checkpoint as it is, by `transformers` and by rackmount, and what `rackmount calibrate --weights`
makes of it.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rackmount import Engine, EngineConfig
from rackmount_registry.plugins import PluginManager
from rackmount_tools.calibration import Calibration, write_calibrated
from rackmount_tools.compressed_config import ROUNDINGS
from rackmount_tools.machine import describe_machine
from rackmount_tools.perplexity import Window, score, windows_of

CHECKPOINT = Path(__file__).parents[1] / "tests" / "assets" / "tiny-moe"
CONTEXT = 512
KV_BYTES = 256 << 20

Windows = Sequence[Window]


def held_out(num_tokens: int | None = None) -> Windows:
    """The first tokens of the held-out text, all of them by default, in disjoint windows."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    ids = tokenizer.encode((CHECKPOINT / "held-out.txt").read_text(encoding="utf-8"))
    return windows_of(ids[:num_tokens], CONTEXT, CONTEXT, bos=None)


def losses(engine: Engine, windows: Windows) -> Tensor:
    """-log p of each scored token: float64 [tokens]."""
    each = [value for nats in score(engine, windows) for value in nats]
    return torch.tensor(each, dtype=torch.float64)


def oracle_losses(model: Any, windows: Windows) -> Tensor:
    """The same by a model of `transformers`."""
    found = []
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor(window.token_ids, device=model.device)
            logits = model(ids[None], use_cache=False).logits[0, :-1]
            chosen = logits.double().log_softmax(-1).gather(-1, ids[1:, None])
            found.append(-chosen[-window.num_scored :, 0].cpu())
    return torch.cat(found)


def perplexity(found: Tensor) -> float:
    """e to the mean of losses."""
    return found.mean().exp().item()


def write_rounded(folder: Path, weights: str, manager: PluginManager) -> None:
    """The checkpoint with rounded weights; `weights` is one of `ROUNDINGS`."""
    config = EngineConfig.create(model=str(CHECKPOINT), device="cpu")
    write_calibrated(config, folder, Calibration(kv_scales="none", weights=weights), manager)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--expert-kernel", default="auto")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    manager, windows = PluginManager.discover(), held_out(args.tokens)

    def of(folder: Path) -> float:
        # Prompts alone: no graphs, and memory for some windows.
        chosen = {"device": args.device, "expert_kernel": args.expert_kernel}
        chosen |= {"enforce_eager": True, "kv_cache_memory_bytes": KV_BYTES}
        with Engine(folder, manager=manager, **chosen) as engine:
            return perplexity(losses(engine, windows))

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).to(args.device)
    found = {"transformers": perplexity(oracle_losses(model, windows)), "bfloat16": of(CHECKPOINT)}
    with tempfile.TemporaryDirectory() as folder:
        for weights in ROUNDINGS:
            write_rounded(Path(folder) / weights, weights, manager)
            found[weights] = of(Path(folder) / weights)

    plain = found["bfloat16"]
    table = {
        name: {"perplexity": each, "over_bfloat16": each / plain - 1}
        for name, each in found.items()
    }
    for name, row in table.items():
        print(f"{name:>12}: {row['perplexity']:.4f} ({row['over_bfloat16']:+.3%})")
    if args.out:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine("torch", "transformers"),
            "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
            "tokens": sum(window.num_scored for window in windows),
            "rows": table,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
