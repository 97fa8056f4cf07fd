"""Layers of experts in every weight format, tokens for them, and what they must come to."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_registry.experts import ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight

FORMATS: dict[str, dict] = {
    "dense": {},
    "fp8_rows": {},
    "fp8_blocks": {},
    "int4_groups": {"group": 32},
    "int4_groups of rows": {"group": 100_000},
    "int4_groups with zeros, in another order": {"group": 32, "zeros": True, "order": True},
    "int8_groups": {"group": 32},
    "int8_groups with zeros": {"group": 32, "zeros": True},
}
"""Weight formats with what they may hold: the first word is the format's name."""


def expert_weight(
    name: str, experts: int, parts: tuple[int, ...], columns: int, dtype: torch.dtype
) -> Weight:
    """Random, of a size that keeps products near their inputs'. `dtype` is of dense ones."""
    fmt, options = name.split()[0], FORMATS[name]
    rows, size = sum(parts), (experts, sum(parts), columns)
    if fmt == "dense":
        dense = (torch.randn(size) / columns**0.5).to(dtype)
        return Weight(fmt, {"weight": dense}, parts, columns)
    if fmt.startswith("fp8"):
        blocks = (sum(-(-part // 128) for part in parts), -(-columns // 128))
        scales = torch.rand(experts, *((rows,) if fmt == "fp8_rows" else blocks)) + 0.5
        values = (torch.randn(size) * 50).to(torch.float8_e4m3fn)
        scales /= 50 * columns**0.5
        return Weight(fmt, {"values": values, "scales": scales}, parts, columns)
    group = min(options["group"], columns)
    dims = (experts, rows, -(-columns // group))
    levels = 16 if fmt == "int4_groups" else 256
    tensors = {"scales": (torch.rand(dims) + 0.5) * 4 / levels / columns**0.5}
    if levels == 16:
        words = (experts, rows, -(-columns // 8))
        tensors["values"] = torch.randint(-(2**31), 2**31, words, dtype=torch.int32)
    else:
        tensors["values"] = torch.randint(0, 256, size, dtype=torch.uint8)
    if options.get("zeros"):
        tensors["zeros"] = torch.randint(0, levels, dims, dtype=torch.uint8)
    if options.get("order"):
        tensors["order"] = torch.stack([torch.randperm(columns) for _ in range(experts)]).int()
        tensors["order"][:, 3] = -1
    return Weight(fmt, tensors, parts, columns, group=group)


def expert_bundle(
    name: str, experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32
) -> ExpertBundle:
    """A layer in one of `FORMATS`."""
    return ExpertBundle(
        gate_up=expert_weight(name, experts, (width, width), hidden, dtype),
        down=expert_weight(name, experts, (hidden,), width, dtype),
    )


def expert_tokens(
    count: int, experts: int, hidden: int, top_k: int, dtype: torch.dtype = torch.float32
) -> ExpertInput:
    """Rows that lie apart; some choices are of other ranks, and expert 3 has no token."""
    scores = torch.rand(count, experts)
    scores[:, 3] = -1
    ids = scores.topk(top_k).indices.int()
    ids[torch.rand(ids.shape) < 0.2] = -1
    x = torch.randn(count, hidden + 8).to(dtype)[:, 8:]
    weights = torch.rand(count, top_k).where(ids >= 0, torch.nan)
    return ExpertInput(x=x, expert_ids=ids, weights=weights)


CHOICES = ("any", "one", "none")
"""How tokens choose; see `expert_choices`."""


def expert_choices(
    choices: str, count: int, experts: int, hidden: int, top_k: int, dtype: torch.dtype
) -> ExpertInput:
    """Tokens that choose any experts, some of other ranks; all of them "one", the last; or
    "none"."""
    scores = torch.rand(count, experts)
    ids = scores.topk(top_k).indices.int()
    ids[torch.rand(ids.shape) < 0.2] = -1
    if choices != "any":
        ids[:] = -1
    if choices == "one":
        ids[:, -1] = experts - 1
    weights = torch.rand(count, top_k).where(ids >= 0, torch.nan)
    return ExpertInput(x=torch.randn(count, hidden).to(dtype), expert_ids=ids, weights=weights)


def defined_experts(given: ExpertInput, layer: ExpertBundle) -> Tensor:
    """The layer's output in float64, expert by expert."""
    gate_up, down = layer.gate_up.dequantize().double(), layer.down.dequantize().double()
    out = torch.zeros_like(given.x, dtype=torch.float64)
    for expert in range(len(down)):
        tokens, choices = torch.where(given.expert_ids == expert)
        gate, up = (given.x[tokens].double() @ gate_up[expert].T).chunk(2, -1)
        y = (F.silu(gate) * up) @ down[expert].T
        out.index_add_(0, tokens, y * given.weights[tokens, choices].double().unsqueeze(-1))
    return out
