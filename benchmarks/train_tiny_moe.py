"""Trains tests/assets/tiny-moe: a Qwen3-MoE of 4 million parameters that has read Python's library.

Usage: python benchmarks/train_tiny_moe.py OUT [--device cuda] [--steps N] [--batch N]

The text is what every machine with Python has: the modules of its standard library and the topics
of its manual (`pydoc_data`), without tests and tables of characters. The modules of `HELD_OUT` are
neither trained on nor seen by the tokenizer. It needs torch, transformers and tokenizers alone.

Routing shall be skewed as that of real models is, so the loss that balances experts is weak. The
weights with the lowest held-out loss are kept, and saved as bfloat16: 8.4 MB.

OUT gets a checkpoint as the Hub has them, held-out.txt, and training.json, which says what was
trained how, and how the saved weights do on the held-out text.
"""

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

HELD_OUT = ("fractions.py", "heapq.py", "queue.py", "shlex.py", "textwrap.py")
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
LICENSE = "Python Software Foundation License, version 2 (PSF-2.0), of CPython"
END = "<|endoftext|>"
LENGTH = 1024
EVALUATE_EVERY = 100

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,  # a whole block of FP8, a whole group of 4-bit weights
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
    "router_aux_loss_coef": 0.001,
}


def library() -> tuple[list[str], str]:
    """The modules to train on, sorted by path, and the held-out ones as one text."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not LEFT_OUT.intersection(path.relative_to(root).parts)
    )
    held_out = "\n".join((root / name).read_text(encoding="utf-8") for name in HELD_OUT)
    read = [
        (root / name).read_text(encoding="utf-8", errors="replace")
        for name in names
        if str(name) not in HELD_OUT
    ]
    return read, held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """BPE over bytes: any text can be encoded, and comes back as it was."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)


def batches(ids: Tensor, size: int, device: str) -> Iterator[Tensor]:
    """Random windows of ids [N], for ever: int64 [size, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(LENGTH + 1)
    while True:
        starts = torch.randint(len(ids) - LENGTH, (size, 1), generator=generator)
        yield ids[starts + offsets].to(device)


def learning_rate(step: int, steps: int) -> float:
    """Share of the highest rate: linear over the first twentieth, then a cosine down to 0."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


@torch.no_grad()
def evaluate(model: Qwen3MoeForCausalLM, ids: Tensor) -> tuple[float, list[float]]:
    """Mean loss over ids [N] in windows of LENGTH, and load skew of each layer with experts.

    The skew is what the busiest expert gets over what one gets on average: 1 is even.
    """
    loss, loads = torch.zeros(()), torch.zeros(())
    for window in ids.split(LENGTH):
        out = model(window[None], output_router_logits=True, use_cache=False)
        loss = loss + cross_entropy(out.logits[0, :-1].float(), window[1:], reduction="sum").cpu()
        chosen = [x.topk(SIZES["num_experts_per_tok"]).indices for x in out.router_logits]
        counts = [x.flatten().bincount(minlength=SIZES["num_experts"]) for x in chosen]
        loads = loads + torch.stack(counts).cpu()
    num_predicted = len(ids) - len(ids.split(LENGTH))
    return loss.item() / num_predicted, (loads.amax(1) / loads.mean(1)).tolist()


def train(
    model: Qwen3MoeForCausalLM, ids: Tensor, held_out: Tensor, *, steps: int, batch: int
) -> list[dict[str, float]]:
    """Leaves the weights with the lowest held-out loss in `model`; gives the losses on the way."""
    matrices = [x for x in model.parameters() if x.dim() > 1]
    norms = [x for x in model.parameters() if x.dim() == 1]
    groups = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    losses: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}
    windows = batches(ids, batch, held_out.device.type)
    for step, window in zip(range(1, steps + 1), windows, strict=False):
        inputs, targets = window[:, :-1], window[:, 1:]
        out = model(inputs, output_router_logits=True, use_cache=False)
        loss = cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())
        balance = transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func(
            out.router_logits, SIZES["num_experts"], SIZES["num_experts_per_tok"]
        )
        (loss + SIZES["router_aux_loss_coef"] * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVALUATE_EVERY == 0 or step == steps:
            unseen, skew = evaluate(model, held_out)
            if not losses or unseen < min(entry["held_out"] for entry in losses):
                best = {name: x.detach().clone() for name, x in model.state_dict().items()}
            losses.append({"step": step, "training": loss.item(), "held_out": unseen})
            print(f"step {step}: {loss.item():.3f}, held out {unseen:.3f}, skew {skew}", flush=True)
    model.load_state_dict(best)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    texts, held_out = library()
    tokenizer = train_tokenizer(texts)
    ids = torch.tensor([i for text in texts for i in [*tokenizer.encode(text), 0]])
    unseen = torch.tensor(tokenizer.encode(held_out), device=args.device)

    config = Qwen3MoeConfig(**SIZES, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    model = Qwen3MoeForCausalLM(config).to(args.device)
    model.set_experts_implementation("eager")
    losses = train(model, ids, unseen, steps=args.steps, batch=args.batch)
    model.bfloat16().save_pretrained(args.out)
    (args.out / "generation_config.json").unlink()  # it says nothing that config.json does not
    tokenizer.save_pretrained(args.out)
    (args.out / "held-out.txt").write_text(held_out, encoding="utf-8")

    loss, skew = evaluate(model.float(), unseen)
    record = {
        "text": "the standard library of Python " + platform.python_version(),
        "license": LICENSE,
        "held_out": HELD_OUT,
        "parameters": model.num_parameters(),
        "tokens": len(ids),
        "tokens_seen": args.steps * args.batch * LENGTH,
        "steps": losses,
        "saved": {
            "held_out_tokens": len(unseen),
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss * len(unseen) / len(held_out.encode()) / math.log(2),
            "expert_load_max_over_mean": skew,
        },
        "seconds": round(time.perf_counter() - start),
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["saved"], indent=1))


if __name__ == "__main__":
    main()
