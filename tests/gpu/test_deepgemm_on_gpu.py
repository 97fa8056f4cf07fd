"""DeepGEMM itself, where it is installed."""

import pytest
import torch
from tests.helpers.batched import round_columns

from rackmount_moe.torch_experts import TorchExperts
from rackmount_registry.experts import BatchedExpertInput, ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight
from rackmount_registry.offers import is_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="kernels of deep_gemm for Hopper",
    ),
    pytest.mark.skipif(not is_installed("deep_gemm"), reason="deep_gemm is not installed"),
]

EXPERTS, HIDDEN, WIDTH = 16, 512, 256


def weight_of(shape: tuple[int, ...], parts: tuple[int, ...]) -> Weight:
    values = torch.randn(shape, device="cuda").clamp(-3, 3).to(torch.float8_e4m3fn)
    blocks = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    scales = torch.rand(blocks, device="cuda") * 0.01 + 0.001
    tensors = {"values": values, "scales": scales}
    return Weight("fp8_blocks", tensors, parts, shape[-1], activation="group")


@pytest.mark.parametrize("count", [0, 1, 7, 64, 256, 257, 1000])
def test_experts_are_close_to_the_definition(count: int) -> None:
    from rackmount_deepgemm.experts import DeepGemmExperts

    bundle = ExpertBundle(
        gate_up=weight_of((EXPERTS, 2 * WIDTH, HIDDEN), (WIDTH, WIDTH)),
        down=weight_of((EXPERTS, HIDDEN, WIDTH), (HIDDEN,)),
    )
    kernel = DeepGemmExperts()
    x = torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(count, EXPERTS, device="cuda").argsort(-1)[:, :4].to(torch.int32)
    ids[1::3, 2] = -1
    weights = torch.rand(ids.shape, device="cuda")
    given = ExpertInput(x=x, expert_ids=ids, weights=weights)
    out = kernel.run(given, kernel.prepare(bundle)).float()
    expected = TorchExperts().run(given, bundle).float()
    error = (out - expected).norm() / expected.norm().clamp(min=1e-9)
    assert out.shape == expected.shape and error < 0.07  # both inputs are rounded to FP8


@pytest.mark.parametrize("chosen", [[5], [0, 2, 9, 15], []], ids=["one", "some", "none"])
@pytest.mark.parametrize("count", [7, 256, 1000])
def test_experts_may_get_all_tokens_or_none(count: int, chosen: list[int]) -> None:
    """Each token chooses all of `chosen`, and beside them an expert of another rank."""
    from rackmount_deepgemm.experts import DeepGemmExperts

    bundle = ExpertBundle(
        gate_up=weight_of((EXPERTS, 2 * WIDTH, HIDDEN), (WIDTH, WIDTH)),
        down=weight_of((EXPERTS, HIDDEN, WIDTH), (HIDDEN,)),
    )
    kernel = DeepGemmExperts()
    x = torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([[-1, *chosen]] * count, dtype=torch.int32, device="cuda")
    given = ExpertInput(x=x, expert_ids=ids, weights=torch.rand(ids.shape, device="cuda"))
    out = kernel.run(given, kernel.prepare(bundle)).float()
    expected = TorchExperts().run(given, bundle).float()
    assert out.shape == expected.shape and bool(out.any()) == bool(chosen)
    assert (out - expected).norm() <= 0.07 * expected.norm()  # both inputs are rounded to FP8


@pytest.mark.parametrize("capacity", [0, 6, 128, 200])
@pytest.mark.parametrize("rounded", [False, True])
def test_filled_boxes_are_close_to_the_definition(capacity: int, rounded: bool) -> None:
    from rackmount_deepgemm.experts import DeepGemmExperts

    bundle = ExpertBundle(
        gate_up=weight_of((EXPERTS, 2 * WIDTH, HIDDEN), (WIDTH, WIDTH)),
        down=weight_of((EXPERTS, HIDDEN, WIDTH), (HIDDEN,)),
    )
    kernel = DeepGemmExperts()
    x = torch.randn(EXPERTS, capacity, HIDDEN, device="cuda", dtype=torch.bfloat16)
    num_valid = torch.arange(EXPERTS, dtype=torch.int32, device="cuda").clamp(max=capacity)
    taken = torch.arange(capacity, device="cuda") < num_valid.unsqueeze(1)
    x[~taken] = torch.nan
    values, scales = round_columns(x) if rounded else (x, None)
    given = BatchedExpertInput(x=values, num_valid=num_valid, dtype=x.dtype, scales=scales)
    out = kernel.run(given, kernel.prepare(bundle))
    expected = TorchExperts().run(given, bundle)
    assert out.shape == x.shape and out.dtype == x.dtype
    out, expected = out[taken].float(), expected[taken].float()
    assert (out - expected).norm() <= 0.07 * expected.norm()  # inputs are rounded to FP8


@pytest.mark.parametrize("count", [0, 1, 33, 300])
def test_products_are_close_to_the_definition(count: int) -> None:
    from rackmount_deepgemm.linear import DeepGemmLinear

    weight = weight_of((768, HIDDEN), (512, 256))
    kernel = DeepGemmLinear()
    x = torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out = kernel.run(x, kernel.prepare(weight), None).float()
    expected = x.float() @ weight.dequantize().T
    assert (out - expected).norm() <= 0.04 * expected.norm()


def test_an_input_that_is_no_number_gives_none() -> None:
    from rackmount_deepgemm.linear import DeepGemmLinear

    kernel = DeepGemmLinear()
    x = torch.randn(33, HIDDEN, device="cuda", dtype=torch.bfloat16)
    x[7, 200] = torch.nan
    out = kernel.run(x, kernel.prepare(weight_of((256, HIDDEN), (256,))), None)
    assert out[7].isnan().all()
    assert out[:7].isfinite().all() and out[8:].isfinite().all()
