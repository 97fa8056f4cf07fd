"""What a process of its own costs a rank: decode steps in this process and in another, in one run.

Usage: python benchmarks/executor_overhead.py [--layers 32] [--pairs 20] [--out FILE.json]

A Llama of the 8B's shape with random bfloat16 weights is written to a temporary folder and mounted
twice at tp=1: by the in-process executor and by the multiprocess one. Every decode step is timed,
greedy, both in turn; the ratio of the medians counts.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from rackmount import Engine, SamplingParams
from rackmount_tools.machine import describe_machine

WIDTH, VOCAB, PROMPT_TOKENS = 128, 128256, 64
WAYS = ("in-process", "multiprocess")


def write_checkpoint(folder: Path, layers: int, hidden: int) -> None:
    """A folder as `save_pretrained` writes it, a file for each layer; all layers are alike."""
    heads, kv, inner = hidden // WIDTH, hidden // 4, hidden * 7 // 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    one = {name: _random(*shape) for name, shape in shapes.items()}
    one |= {name: _ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    for index in range(layers):
        named = {f"model.layers.{index}.{name}.weight": tensor for name, tensor in one.items()}
        save_file(named, folder / f"layer-{index:03}.safetensors")
    ends = {"model.embed_tokens.weight": _random(VOCAB, hidden), "model.norm.weight": _ones(hidden)}
    save_file(ends | {"lm_head.weight": _random(VOCAB, hidden)}, folder / "ends.safetensors")


def _random(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def step_ms(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[float]:
    """Milliseconds of each decode step: what `engine.core.step` takes, from plan to tokens."""
    times = []
    step = engine.core.step

    def timed() -> bool:
        start = time.perf_counter()
        stepped = step()
        times.append((time.perf_counter() - start) * 1e3)
        return stepped

    engine.core.step = timed  # type: ignore[method-assign]
    try:
        params = SamplingParams(temperature=0, max_tokens=num_tokens + 1, ignore_eos=True)
        engine.generate(prompts, params)
    finally:
        engine.core.step = step  # type: ignore[method-assign]
    return times[-num_tokens:]


def compare(engines: dict[str, Engine], batch: int, num_tokens: int, pairs: int) -> dict[str, Any]:
    """Quartiles of the steps of both, and the ratio of their medians."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(VOCAB, (batch, PROMPT_TOKENS), generator=generator).tolist()
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(pairs + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            taken = step_ms(engines[way], prompts, num_tokens)
            steps[way] += taken if number else []  # the first pair warms up
    quartiles = {way: statistics.quantiles(steps[way], n=4) for way in WAYS}
    mine, other = (quartiles[way] for way in WAYS)
    figures = {f"{way}_quartiles_ms": [round(q, 3) for q in quartiles[way]] for way in WAYS}
    return figures | {"ratio": round(other[1] / mine[1], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=4096, help="a multiple of 512")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where to write the model; else temporary")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory(dir=args.folder) as name:
        write_checkpoint(Path(name), args.layers, args.hidden_size)
        engines = {
            way: Engine(
                name,
                executor=way,
                device=args.device,
                dtype="bfloat16",
                max_model_len=1024,
                max_num_seqs=max(args.batches),
                num_kv_blocks=max(args.batches) * 64,
                block_size=16,
                enable_prefix_caching=False,
            )
            for way in WAYS
        }
        results = {
            f"batch {batch}": compare(engines, batch, args.tokens, args.pairs)
            for batch in args.batches
        }
        for engine in engines.values():
            engine.close()
    machine = describe_machine("torch") | {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "layers": args.layers,
        "hidden_size": args.hidden_size,
    }
    summary = json.dumps({"machine": machine, "decode_step": results}, indent=1)
    print(summary)
    if args.out:
        args.out.write_text(summary + "\n")


if __name__ == "__main__":
    main()
