"""Random weights in the named formats, as `rackmount_registry.formats.WEIGHT_FORMATS` has them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rackmount_registry.formats import BLOCK, Activation, Weight


def int_groups(
    bits: int,
    n: int,
    k: int,
    group: int,
    *,
    zeros: bool = False,
    padding: int | None = None,
    device: str = "cpu",
) -> Weight:
    """`group` columns to a scale, the last ones fewer. With `padding` columns are in act-order, and
    so many of them are nobody's."""
    shape = (n, -(-k // group))
    if bits == 4:
        values = torch.randint(-(1 << 31), 1 << 31, (n, -(-k // 8))).to(torch.int32)
    else:
        values = torch.randint(0, 256, (n, k)).to(torch.uint8)
    tensors = {"values": values, "scales": _scales(*shape, bits=bits).half()}
    if zeros:
        tensors["zeros"] = torch.randint(0, 1 << bits, shape).to(torch.uint8)
    inputs = k - (padding or 0)
    if padding is not None:
        places = torch.randperm(k).to(torch.int32)
        tensors["order"] = places.where(places < inputs, -1)
    return Weight(f"int{bits}_groups", _to(tensors, device), (n,), inputs, group)


def int8_rows(n: int, k: int, activation: Activation = "plain", device: str = "cpu") -> Weight:
    values = torch.randint(-128, 128, (n, k)).to(torch.int8)
    tensors = _given({"values": values, "scales": _scales(n, bits=8)}, activation, 0.03)
    return Weight("int8_rows", _to(tensors, device), (n,), k, activation=activation)


def fp8_rows(n: int, k: int, activation: Activation = "plain", device: str = "cpu") -> Weight:
    tensors = _given({"values": _e4m3(n, k), "scales": _scales(n, bits=8)}, activation, 0.008)
    return Weight("fp8_rows", _to(tensors, device), (n,), k, activation=activation)


def fp8_blocks(
    parts: tuple[int, ...], k: int, activation: Activation = "plain", device: str = "cpu"
) -> Weight:
    rows = sum(-(-part // BLOCK) for part in parts)
    tensors = {"values": _e4m3(sum(parts), k), "scales": _scales(rows, -(-k // BLOCK), bits=8)}
    return Weight("fp8_blocks", _to(tensors, device), parts, k, activation=activation)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is not a number, or far out."""

    def empty(*size: Any, dtype: torch.dtype = torch.float32, **more: Any) -> Tensor:
        number = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
        shape = size[0] if len(size) == 1 else size
        return torch.full(shape, number, dtype=dtype, **more)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **_: empty(x.shape, dtype=x.dtype, device=x.device)
    )


def _scales(*shape: int, bits: int) -> Tensor:
    return (torch.rand(shape) + 0.5) * (0.1 if bits == 4 else 0.01)


def _e4m3(n: int, k: int) -> Tensor:
    """Every magnitude, subnormal ones too."""
    values = torch.randn(n, k) * torch.exp2(torch.randint(-9, 8, (n, k)))
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def _given(tensors: dict[str, Tensor], activation: Activation, scale: float) -> dict[str, Tensor]:
    return tensors | ({"input_scale": torch.tensor([scale])} if activation == "tensor" else {})


def _to(tensors: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
