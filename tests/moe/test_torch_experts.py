"""The reference expert kernel and the local dispatcher against the sum that defines them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_moe.local import LocalDispatcher
from rackmount_moe.torch_experts import TorchExperts
from rackmount_registry.axes import Cut, Solo
from rackmount_registry.experts import DispatchContext, ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 12, 10, 6, 2


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense_bundle(dtype: torch.dtype = torch.float64) -> ExpertBundle:
    gate_up = randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, seed=1).to(dtype)
    down = randn(NUM_EXPERTS, HIDDEN, WIDTH, seed=2).to(dtype)
    return ExpertBundle(
        gate_up=Weight("dense", {"weight": gate_up}, (WIDTH, WIDTH), HIDDEN),
        down=Weight("dense", {"weight": down}, (HIDDEN,), WIDTH),
    )


def int8_bundle() -> ExpertBundle:
    def weight(rows: int, columns: int, parts: tuple[int, ...], seed: int) -> Weight:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_EXPERTS, rows, columns)
        values = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        scales = torch.rand(shape[:2], generator=generator) / 64
        return Weight("int8_rows", {"values": values, "scales": scales}, parts, columns)

    return ExpertBundle(
        gate_up=weight(2 * WIDTH, HIDDEN, (WIDTH, WIDTH), 1),
        down=weight(HIDDEN, WIDTH, (HIDDEN,), 2),
    )


def context(local: Cut, group: Solo) -> DispatchContext:
    return DispatchContext(
        num_experts=NUM_EXPERTS,
        local_experts=local,
        group=group,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def random_input(num_tokens: int, dtype: torch.dtype = torch.float64) -> ExpertInput:
    """Each token with two different experts; expert 4 has no token."""
    chosen = randn(num_tokens, NUM_EXPERTS, seed=3)
    chosen[:, 4] = -100
    return ExpertInput(
        x=randn(num_tokens, HIDDEN, seed=4).to(dtype),
        expert_ids=chosen.topk(TOP_K).indices.int(),
        weights=randn(num_tokens, TOP_K, seed=5).abs().float(),
    )


def defined(given: ExpertInput, bundle: ExpertBundle) -> Tensor:
    """One token and one expert at a time, in float64."""
    gate_up, down = bundle.gate_up.dequantize().double(), bundle.down.dequantize().double()
    out = torch.zeros_like(given.x, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(given.expert_ids, given.weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert] @ given.x[token].double()).chunk(2)
                out[token] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


def run(given: ExpertInput, bundle: ExpertBundle) -> Tensor:
    kernel = TorchExperts()
    return kernel.run(given, kernel.prepare(bundle))


def assert_defined(given: ExpertInput, bundle: ExpertBundle) -> None:
    torch.testing.assert_close(run(given, bundle), defined(given, bundle), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bundle", [dense_bundle(), int8_bundle()], ids=["dense", "int8_rows"])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_the_output_is_the_weighted_sum_of_each_tokens_experts(
    bundle: ExpertBundle, num_tokens: int
) -> None:
    assert_defined(random_input(num_tokens), bundle)


def test_all_tokens_may_choose_one_expert() -> None:
    given = random_input(9)
    ids = torch.tensor([3, 0], dtype=torch.int32).expand(9, TOP_K)
    assert_defined(replace(given, expert_ids=ids), dense_bundle())


def test_experts_of_other_ranks_are_left_out() -> None:
    given = random_input(9)
    ids = given.expert_ids.clone()
    ids[2:, 0] = -1
    ids[5] = -1
    given = replace(given, expert_ids=ids)
    assert_defined(given, dense_bundle())
    assert torch.equal(run(given, dense_bundle())[5], torch.zeros(HIDDEN, dtype=torch.float64))


def test_a_token_gets_the_same_alone_as_in_a_batch() -> None:
    given, bundle = random_input(9), dense_bundle()
    whole = run(given, bundle)
    for token in range(9):
        row = slice(token, token + 1)
        alone = ExpertInput(
            x=given.x[row], expert_ids=given.expert_ids[row], weights=given.weights[row]
        )
        torch.testing.assert_close(run(alone, bundle), whole[row], rtol=1e-13, atol=1e-13)


def test_the_order_of_a_tokens_choices_does_not_matter() -> None:
    given, bundle = random_input(9, torch.float32), dense_bundle(torch.float32)
    turned = replace(given, expert_ids=given.expert_ids.flip(1), weights=given.weights.flip(1))
    assert torch.equal(run(given, bundle), run(turned, bundle))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
)
@pytest.mark.parametrize("form", ["dense", "int8_rows"])
def test_narrow_dtypes_stay_close(dtype: torch.dtype, tolerance: float, form: str) -> None:
    given = random_input(9, dtype)
    bundle = dense_bundle(dtype) if form == "dense" else int8_bundle()
    out, wanted = run(given, bundle), defined(given, bundle)
    assert out.dtype == dtype
    error = (out.double() - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance


def test_many_small_shares_are_not_lost_in_a_narrow_sum() -> None:
    bundle = dense_bundle(torch.bfloat16)
    alike = {
        name: replace(weight, tensors={"weight": weight.tensors["weight"][:1].expand(6, -1, -1)})
        for name, weight in (("gate_up", bundle.gate_up), ("down", bundle.down))
    }
    one = ExpertInput(
        x=randn(1, HIDDEN, seed=4).bfloat16(),
        expert_ids=torch.zeros(1, 1, dtype=torch.int32),
        weights=torch.ones(1, 1),
    )
    shares = torch.tensor([[1.0, *[1 / 512] * 5]])  # bfloat16 rounds 1 + 1/512 to 1
    many = replace(one, expert_ids=torch.arange(6).int().unsqueeze(0), weights=shares)
    whole = run(one, ExpertBundle(**alike)).float() * shares.sum()
    assert torch.equal(run(many, ExpertBundle(**alike)), whole.bfloat16())


def test_one_rank_completes_the_sum_and_several_give_shares_of_it() -> None:
    given, bundle = random_input(9), dense_bundle()
    whole = LocalDispatcher(context(Cut(0, NUM_EXPERTS), Solo()))
    assert whole.reduces
    shares = []
    for start, stop in ((0, 2), (2, NUM_EXPERTS)):
        local = context(Cut(start, stop), Solo(rank=0, size=2))
        dispatcher = LocalDispatcher(local)
        assert not dispatcher.reduces
        sent = dispatcher.dispatch(given.x, given.expert_ids, given.weights)
        assert int(sent.expert_ids.max()) < stop - start
        mine = ExpertBundle(
            gate_up=cut(bundle.gate_up, start, stop), down=cut(bundle.down, start, stop)
        )
        shares.append(dispatcher.combine(run(sent, mine), sent))
    sent = whole.dispatch(given.x, given.expert_ids, given.weights)
    complete = whole.combine(run(sent, bundle), sent)
    assert torch.equal(complete, run(given, bundle))
    torch.testing.assert_close(shares[0] + shares[1], complete, rtol=0, atol=1e-13)


def cut(weight: Weight, start: int, stop: int) -> Weight:
    """The bundle of experts start to stop."""
    tensors = {name: tensor[start:stop] for name, tensor in weight.tensors.items()}
    return replace(weight, tensors=tensors)
