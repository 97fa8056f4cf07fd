"""The socket of routed experts: what it stores, under which names, and what padding does to it."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.memory import MemoryCheckpoint, draft_module, random_tensors
from tests.helpers.mounting import Reference, chosen_parts, mount_draft
from tests.helpers.routing import random_bias
from torch import Tensor, nn

from rackmount_moe.torch_experts import TorchExperts
from rackmount_quant.w8 import quantize_rows
from rackmount_registry.axes import Axis, Mesh, Solo
from rackmount_registry.errors import ConfigError
from rackmount_registry.experts import ExpertBundle, ExpertUse
from rackmount_registry.formats import QuantizationScheme
from rackmount_registry.nn import Experts, GatedMLP, Linear, Routing, SparseMLP
from rackmount_registry.ops import reference_ops

HIDDEN, WIDTH, COUNT = 8, 6, 4
EXPERTS, FFN = Axis("experts", COUNT), Axis("expert_ffn", WIDTH)


class Model(nn.Module):
    """One layer of experts over given rows, which stand for token ids."""

    def __init__(self, mlp: nn.Module, name: str = "mlp") -> None:
        super().__init__()
        self.name = name
        setattr(self, name, mlp)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(x)


def experts(**arguments: Any) -> Experts:
    return Experts(HIDDEN, EXPERTS, FFN, **({"routing": Routing(top_k=2)} | arguments))


def mounted(
    tensors: Mapping[str, Tensor],
    mesh: Mesh | None = None,
    scheme: QuantizationScheme | None = None,
    **arguments: Any,
) -> Reference:
    """Experts in a `SparseMLP` called `mlp`."""
    drafted = draft_module(lambda: Model(SparseMLP(experts(**arguments))), mesh=mesh, scheme=scheme)
    return mount_draft(drafted, MemoryCheckpoint(tensors))


def plain_tensors(**arguments: Any) -> dict[str, Tensor]:
    return random_tensors(draft_module(lambda: Model(SparseMLP(experts(**arguments)))))


def run(reference: Reference, x: Tensor) -> Tensor:
    reference.step.begin([len(x)])
    return reference.mounted.forward(x)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def respelled(tensors: Mapping[str, Tensor], changes: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors with parts of their names replaced."""
    result = {}
    for name, tensor in tensors.items():
        for old, new in changes.items():
            name = name.replace(old, new)
        result[name] = tensor
    return result


def fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts `mlp.experts.{e}` as transformers 5 holds them."""

    def stack(part: str) -> Tensor:
        return torch.stack([tensors[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(COUNT)])

    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    return rest | {
        "mlp.experts.gate_up_proj": torch.cat((stack("gate"), stack("up")), 1),
        "mlp.experts.down_proj": stack("down"),
    }


def test_every_spelling_of_a_layer_gives_the_same() -> None:
    tensors, x = plain_tensors(), randn(9, HIDDEN)
    expected = run(mounted(tensors), x)
    assert torch.equal(run(mounted(fused(tensors)), x), expected)
    w = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp.": "block_sparse_moe."}
    mixtral = {"projections": ("w1", "w3", "w2"), "stored_in": "block_sparse_moe"}
    for stored in (respelled(tensors, w), fused(tensors)):
        assert torch.equal(run(mounted(stored, **mixtral), x), expected)


@pytest.mark.parametrize("axis", ["experts", "expert_ffn"])
def test_a_rank_reads_its_share_of_experts_that_are_stored_as_one(axis: str) -> None:
    tensors, x = plain_tensors(), randn(9, HIDDEN)
    whole, shares = run(mounted(tensors), x), []
    for rank in range(2):
        reference = mounted(fused(tensors), Mesh(groups={axis: Solo(rank, 2)}))
        reference.mounted.draft.experts[0].deferred = True
        shares.append(run(reference, x))
    torch.testing.assert_close(sum(shares), whole, rtol=0, atol=1e-13)


def test_a_bias_is_a_float32_vector_beside_the_socket() -> None:
    routing = Routing(top_k=2, scoring="sigmoid", float32_logits=True)
    given = {"routing": routing, "bias": "gate.e_score_correction_bias"}
    tensors, x = plain_tensors(**given), randn(40, HIDDEN)
    name = "mlp.gate.e_score_correction_bias"
    without = run(mounted(tensors | {name: torch.zeros(COUNT)}, **given), x)
    bias = random_bias(COUNT)
    reference = mounted(tensors | {name: bias}, **given)
    (layer,) = reference.mounted.draft.experts
    out = run(reference, x)
    assert layer.bias.tensor.dtype == torch.float32
    moved = (out - without).abs().amax(-1) > 1e-6
    assert 0.2 < moved.float().mean() < 1


def test_padding_reaches_no_expert_and_is_not_counted() -> None:
    reference, x = mounted(plain_tensors()), randn(5, HIDDEN)
    (layer,) = reference.mounted.draft.experts
    expected = run(reference, x[:3])
    counts = layer.state.load.clone()
    assert int(counts.sum()) == 3 * 2
    layer.state.load.zero_()
    reference.step.begin([5])
    reference.step.slots[3:] = -1
    x[3:] = float("nan")
    out = reference.mounted.forward(x)
    assert torch.equal(out[:3], expected)
    assert torch.equal(out[3:], torch.zeros(2, HIDDEN, dtype=torch.float64))
    assert torch.equal(layer.state.load, counts)


def test_a_router_may_be_stored_in_any_format_and_needs_no_kernel() -> None:
    class Rows:
        kv_cache = None

        def format_for(self, name: str, *rest: Any) -> Any:
            from rackmount_quant.w8 import INT8_ROWS

            return INT8_ROWS if name == "mlp.gate" else None

    tensors, x = plain_tensors(), randn(9, HIDDEN)
    values, scales = quantize_rows(tensors["mlp.gate.weight"].float())
    plain = tensors | {"mlp.gate.weight": (values * scales.unsqueeze(-1)).double()}
    stored = tensors | {"mlp.gate.weight": values, "mlp.gate.weight_scale": scales}
    reference = mounted(stored, scheme=Rows())
    assert reference.mounted.draft.formats() == {"linear": set(), "expert": {"dense"}}
    torch.testing.assert_close(run(reference, x), run(mounted(plain), x), rtol=0, atol=1e-12)


def test_experts_of_other_ranks_are_names_of_the_model_too() -> None:
    class Scheme:
        def format_for(self, name: str, shape: tuple[int, int], role: str) -> None:
            asked.add(name)

        def unmet(self, modules: Collection[str]) -> list[str]:
            wanted = {f"mlp.experts.{e}.down_proj" for e in range(COUNT + 1)}
            return sorted(wanted - set(modules))

    asked: set[str] = set()
    mesh = Mesh(groups={"experts": Solo(1, 2)})
    drafted = draft_module(lambda: Model(SparseMLP(experts())), mesh=mesh, scheme=Scheme())
    assert "mlp.experts.0.down_proj" not in asked
    assert drafted.unmet() == [f"mlp.experts.{COUNT}.down_proj"]


class OfFormerDays(TorchExperts):
    """A kernel whose `prepare` knows of no use."""


class Told(TorchExperts):
    """A kernel that is told what it may compile for."""

    def __init__(self) -> None:
        self.uses: list[ExpertUse | None] = []

    def prepare(self, bundle: ExpertBundle, use: ExpertUse | None = None) -> ExpertBundle:
        self.uses.append(use)
        return bundle


class Router:
    """An operation that is told what it may compile for, before it is called."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def prepare(self, *arguments: Any) -> None:
        self.told.append(arguments)

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        for given, told in zip(arguments[1:], self.told[0], strict=True):
            same = given.dtype == told.dtype if isinstance(given, Tensor) else given is told
            assert same and type(given) is type(told)
        return reference_ops().gate(*arguments)


@pytest.mark.parametrize(
    "kernel", [OfFormerDays(), Told()], ids=lambda kernel: type(kernel).__name__
)
def test_kernels_hear_before_the_first_step_how_they_will_be_called(kernel: TorchExperts) -> None:
    tensors, x = plain_tensors(), randn(9, HIDDEN)
    drafted = draft_module(lambda: Model(SparseMLP(experts())))
    parts, router = chosen_parts(drafted), Router()
    (dispatcher,) = (dispatcher for _, dispatcher in parts.expert_parts.values())
    ops = SimpleNamespace(**(vars(parts.ops) | {"gate": router}))
    parts = replace(parts, ops=ops, expert_parts={"dense": (kernel, dispatcher)})
    reference = mount_draft(drafted, MemoryCheckpoint(tensors), parts=parts)
    assert len(router.told) == 1
    if isinstance(kernel, Told):
        assert kernel.uses == [ExpertUse(top_k=2, dtype=torch.float64)]
    assert torch.equal(run(reference, x), run(mounted(tensors), x))


def test_experts_that_the_routing_does_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="top_k=5 must be 1 to 4"):
        experts(routing=Routing(top_k=5))


class Shared(nn.Module):
    """What a model file writes for a shared expert behind a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts()
        self.shared_expert = GatedMLP(HIDDEN, Axis("ffn", 10))
        self.shared_expert_gate = Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x) + shared


def test_a_gated_shared_expert_is_written_in_the_model_file() -> None:
    """Held against Qwen2-MoE of transformers."""
    import transformers
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    config = transformers.Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=10,
        num_experts=COUNT,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=2,
    )
    assert_block_equals(Qwen2MoeSparseMoeBlock(config), Shared())


def test_shared_experts_of_deepseek() -> None:
    """Held against DeepSeek-V3 of transformers: groups, bias and scaling too."""
    import transformers
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        n_routed_experts=COUNT,
        n_shared_experts=2,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        num_attention_heads=2,
    )
    routing = Routing(
        top_k=2,
        scoring="sigmoid",
        num_groups=2,
        group_score="top2_sum",
        scaling=config.routed_scaling_factor,
        float32_logits=True,
    )
    bias = "gate.e_score_correction_bias"
    layer = SparseMLP(experts(routing=routing, bias=bias), GatedMLP(HIDDEN, Axis("ffn", 2 * WIDTH)))
    block = DeepseekV3MoE(config)
    block.gate.e_score_correction_bias.copy_(random_bias(COUNT) / 4)
    assert_block_equals(block, layer)


def assert_block_equals(block: nn.Module, layer: nn.Module) -> None:
    """A block of transformers, filled with random numbers, and ours with the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    tensors = {f"mlp.{name}": tensor for name, tensor in block.state_dict().items()}
    drafted = draft_module(lambda: Model(layer), dtype=torch.float32)
    reference = mount_draft(drafted, MemoryCheckpoint(tensors))
    x = randn(30, HIDDEN).float()
    with torch.no_grad():
        expected = block(x[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(run(reference, x), expected.reshape(x.shape), rtol=0, atol=2e-5)
