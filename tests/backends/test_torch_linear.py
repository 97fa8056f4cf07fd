"""The torch linear kernels against x times the dequantized weight."""

import pytest
import torch
from torch import Tensor

from rackmount_backends.torch_linear import DenseLinear, DequantizedLinear
from rackmount_registry.formats import Weight

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-3,
}

PARTS = (5, 2, 2)


def dense(dtype: torch.dtype) -> Weight:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 16, generator=generator, dtype=torch.float64).to(dtype)
    return Weight("dense", {"weight": weight}, PARTS, 16)


def int8() -> Weight:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (9, 16), generator=generator, dtype=torch.int8)
    scales = torch.rand(9, generator=generator)
    return Weight("int8_rows", {"values": values, "scales": scales}, PARTS, 16)


def expected(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.dequantize().double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", ["dense", "int8_rows"])
def test_a_product_is_that_of_the_dequantized_weight(
    dtype: torch.dtype, num_tokens: int, biased: bool, form: str
) -> None:
    kernel, weight = (
        (DenseLinear(), dense(dtype)) if form == "dense" else (DequantizedLinear(), int8())
    )
    x = torch.randn(num_tokens, 20, dtype=torch.float64).to(dtype)[:, 4:]
    bias = torch.randn(9, dtype=torch.float64).to(dtype) if biased else None
    out = kernel.run(x, kernel.prepare(weight), bias)
    assert out.dtype == dtype
    tolerance = TOLERANCES[dtype]
    wanted = expected(x, weight, bias)
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_dense_matrix_stays_the_same_tensor_however_it_lies(dtype: torch.dtype) -> None:
    kernel, weight = DenseLinear(), dense(dtype)
    for _ in range(2):  # a second kernel may share the tensor
        prepared = kernel.prepare(weight)
        assert prepared is weight.tensors["weight"]
        assert torch.equal(prepared, dense(dtype).tensors["weight"])
        assert prepared.t().is_contiguous() == (dtype == torch.float32)


def test_int8_sums_beyond_half_precision_do_not_overflow() -> None:
    values = torch.full((1, 64), 127, dtype=torch.int8)
    weight = Weight("int8_rows", {"values": values, "scales": torch.tensor([1e-3])}, (1,), 64)
    kernel = DequantizedLinear()
    out = kernel.run(torch.full((1, 64), 100.0, dtype=torch.float16), kernel.prepare(weight), None)
    torch.testing.assert_close(out, torch.tensor([[812.8]], dtype=torch.float16))
