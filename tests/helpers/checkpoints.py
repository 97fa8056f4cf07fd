"""Tiny random checkpoints, as `transformers` saves them.

It is imported by who needs it: that takes seconds, and processes that tests start import this, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rackmount_quant.w8 import quantize_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3-moe": "Qwen3Moe",
    "mixtral": "Mixtral",
}
"""Name -> how `transformers` begins the names of its classes."""

VOCAB = 97

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # at the usual 0.02 the logits of so small a model are all but zero
}
EXPERT_SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-moe": {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
}


def tiny_checkpoint(
    folder: Path, family: str, *, seed: int = 0, **overrides: Any
) -> tuple[Path, PreTrainedModel]:
    """Saves a random float32 model to `folder` and gives that and the model.

    Norms scale by 0.5 to 1.5, biases are about as large as what they are added to, and logits have
    a standard deviation above 1: nothing that could be left out goes unseen.
    """
    import transformers

    sizes = SIZES | EXPERT_SIZES.get(family, {}) | overrides
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_()
    model.save_pretrained(folder)
    model.set_experts_implementation("eager")  # the usual one knows no float64
    return folder, model


def oracle_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """ids [T] -> what `transformers` computes, [T, vocabulary]."""
    with torch.inference_mode():
        logits: Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def random_ids(count: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """int64 [count], the same for equal arguments."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes config.json in place."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of a single-file checkpoint in place."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def fuse_experts(folder: Path) -> None:
    """Stores the experts as transformers 5 holds them in memory: one tensor of all for gate and up,
    one for down, and Mixtral's under `mlp`."""

    def fuse(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".block_sparse_moe." in name]:
            renamed = name.replace(".block_sparse_moe.", ".mlp.")
            for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
                renamed = renamed.replace(f".{old}.", f".{new}.")
            tensors[renamed] = tensors.pop(name)
        for first in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
            prefix = first.removesuffix("0.gate_proj.weight")
            count = sum(n.startswith(prefix) and n.endswith(".gate_proj.weight") for n in tensors)
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(count)])
                for part in ("gate", "up", "down")
            )
            tensors[f"{prefix}gate_up_proj"] = torch.cat((gate, up), 1)
            tensors[f"{prefix}down_proj"] = down

    edit_tensors(folder, fuse)


def quantize_w8(
    folder: Path, is_dense: Callable[[str], bool], ignore: list[str]
) -> tuple[Path, Path]:
    """Two copies of a checkpoint: with int8 rows, and with the same values as plain weights.

    Args:
        is_dense: which of the projections, by name, stay as they are.
        ignore: how the configuration says the same.
    """
    quantized, plain = folder.with_name("w8"), folder.with_name("plain")

    def is_projection(name: str) -> bool:
        return name.endswith("_proj.weight") and not is_dense(name.removesuffix(".weight"))

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in list(filter(is_projection, tensors)):
            tensors[name], tensors[f"{name}_scale"] = quantize_rows(tensors[name])

    def round_trip(tensors: dict[str, Tensor]) -> None:
        for name in filter(is_projection, tensors):
            values, scales = quantize_rows(tensors[name])
            tensors[name] = values * scales.unsqueeze(-1)

    edit_tensors(copytree(folder, quantized), quantize)
    edit_tensors(copytree(folder, plain), round_trip)
    stored_as = {"quant_method": "w8", "ignore": ignore}
    edit_config(quantized, lambda config: config.update(quantization_config=stored_as))
    return quantized, plain
