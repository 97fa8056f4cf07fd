"""Scales of an FP8 KV cache, under every name that checkpoints have for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import edit_tensors, random_ids, tiny_checkpoint
from tests.helpers.mounting import Reference, mount_reference
from tests.helpers.ranks import Member, ThreadGroup
from torch import Tensor

from rackmount_registry.attention import FP8, KVCache
from rackmount_registry.axes import Mesh
from rackmount_registry.errors import CheckpointError

PER_TENSOR = KVCache(dtype=FP8)
PER_HEAD = KVCache(dtype=FP8, per="head")
OWN = KVCache(dtype=torch.float32)
IDS = random_ids(20)
NAMES = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("qkqkv_proj.k_scale", "qkqkv_proj.v_scale"),
    ("k_cache.scale", "v_cache.scale"),
]
K, V = 0.37, 0.061


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama of two layers of two KV heads each."""
    return tiny_checkpoint(tmp_path / "model", "llama")[0]


def store(folder: Path, layers: tuple[int, ...] = (0, 1), **values: Any) -> Path:
    """Adds tensors beside the projections of some layers; "__" stands for a dot."""

    def add(tensors: dict[str, Tensor]) -> None:
        for layer in layers:
            for name, value in values.items():
                path = f"model.layers.{layer}.self_attn.{name.replace('__', '.')}"
                tensors[path] = torch.as_tensor(value).clone()

    edit_tensors(folder, add)
    return folder


def named(name: str, value: Any) -> dict[str, Any]:
    return {name.replace(".", "__"): value}


def scales_of(reference: Reference) -> list[tuple[list[float], list[float]]]:
    """Of each layer, keys' and values'."""
    found = [layer.kv_scales for layer in reference.mounted.draft.attention]
    assert all(each.k.dtype == each.v.dtype == torch.float32 for each in found)
    return [(each.k.tolist(), each.v.tolist()) for each in found]


def rounded(value: float, dtype: torch.dtype = torch.float32) -> float:
    return torch.tensor(value, dtype=dtype).item()


@pytest.mark.parametrize(("k_name", "v_name"), NAMES)
def test_every_spelling_is_read(folder: Path, k_name: str, v_name: str) -> None:
    plain = mount_reference(folder).logits(IDS)
    store(folder, **named(k_name, K), **named(v_name, V))
    reference = mount_reference(folder, kv_cache=PER_TENSOR)
    assert scales_of(reference) == [([rounded(K)] * 2, [rounded(V)] * 2)] * 2
    logits = reference.logits(IDS)
    assert 0 < (logits - plain).std() < 0.2 * plain.std()  # with one scale lost it is half


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_scale_has_any_shape_and_float_type(
    folder: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    store(folder, k_scale=torch.full(shape, K, dtype=dtype), v_scale=torch.full(shape, V))
    found = scales_of(mount_reference(folder, kv_cache=PER_TENSOR))
    assert found == [([rounded(K, dtype)] * 2, [rounded(V)] * 2)] * 2


@pytest.mark.parametrize("name", ["kv_scale", "k_scale", "v_proj.v_scale"])
def test_one_scale_serves_both(folder: Path, name: str) -> None:
    store(folder, **named(name, K))
    assert scales_of(mount_reference(folder, kv_cache=PER_TENSOR)) == [([rounded(K)] * 2,) * 2] * 2


@pytest.mark.parametrize(("lone", "missing"), [("v_scale", "k_scale"), ("k_scale", "v_scale")])
def test_a_scale_that_one_layer_lacks_is_missed(folder: Path, lone: str, missing: str) -> None:
    store(folder, layers=(0,), k_scale=K, v_scale=V)
    store(folder, layers=(1,), **{lone: K})
    with pytest.raises(CheckpointError, match=rf"layers\.1\.self_attn\.{missing} is not in the"):
        mount_reference(folder, kv_cache=PER_TENSOR)


def test_a_scale_that_is_given_serves_a_checkpoint_without_any(folder: Path) -> None:
    given = KVCache(dtype=FP8, scale=0.5)
    assert scales_of(mount_reference(folder, kv_cache=given)) == [([0.5] * 2,) * 2] * 2


def test_scales_of_queries_and_probabilities_are_answered_for(folder: Path) -> None:
    """Both are left unrounded."""
    store(folder, k_scale=K, v_scale=V, q_scale=2.0, q_proj__output_scale=3.0)
    store(folder, q__scale=2.0, prob_output_scale=0.1)
    assert scales_of(mount_reference(folder, kv_cache=PER_TENSOR))[0] == (
        [rounded(K)] * 2,
        [rounded(V)] * 2,
    )


def test_zero_points_of_zero_are_answered_for(folder: Path) -> None:
    store(folder, k_scale=K, v_scale=V, k_zero_point=0, v_proj__v_zero_point=[0])
    mount_reference(folder, kv_cache=PER_TENSOR)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_take_the_scales_of_their_heads(tmp_path: Path, size: int) -> None:
    """Of two KV heads: together, apart, and each on two ranks."""
    folder, _ = tiny_checkpoint(tmp_path, "llama", num_attention_heads=4, num_key_value_heads=2)
    store(folder, k_scale=[[[0.01]], [[0.03]]], v_scale=[0.02, 0.05])
    one = mount_reference(folder, dtype=torch.float64, kv_cache=PER_HEAD)
    group = ThreadGroup(size)

    def mount(member: Member) -> Reference:
        mesh = Mesh.tensor_parallel(member)
        return mount_reference(folder, dtype=torch.float64, mesh=mesh, kv_cache=PER_HEAD)

    ranks = [mount(member) for member in group.members]
    whole = ([rounded(0.01), rounded(0.03)], [rounded(0.02), rounded(0.05)])
    per_rank = max(1, 2 // size)
    for rank, reference in enumerate(ranks):
        first = rank * 2 // size
        heads = slice(first, first + per_rank)
        assert scales_of(reference) == [(whole[0][heads], whole[1][heads])] * 2
    expected = one.logits(IDS)
    for logits in group.run(lambda rank: ranks[rank].logits(IDS)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_a_cache_of_the_models_dtype_leaves_scales_only_where_that_was_asked_for(
    folder: Path,
) -> None:
    plain = mount_reference(folder).logits(IDS)
    store(folder, k_proj__k_scale=K, v_proj__v_scale=V, k_zero_point=0, q_scale=1.0)
    store(folder, layers=(1,), k_scale=K)
    asked = KVCache(dtype=torch.float32, ignores_scales=True)
    reference = mount_reference(folder, kv_cache=asked)
    assert all(layer.kv_scales is None for layer in reference.mounted.draft.attention)
    assert torch.equal(reference.logits(IDS), plain)
    with pytest.raises(CheckpointError) as refused:
        mount_reference(folder, kv_cache=OWN)
    assert str(refused.value).startswith(
        "the checkpoint has scales of quantized attention, "
        "model.layers.0.self_attn.k_proj.k_scale in model.safetensors and 8 more"
    )
    assert "kv_cache_dtype='fp8'" in str(refused.value)
    assert "kv_cache_dtype='model'" in str(refused.value)


def test_layers_without_scales_are_named_with_the_ways_out(folder: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        mount_reference(folder, kv_cache=PER_TENSOR)
    assert str(refused.value) == (
        "2 of 2 attention layers have no scales for their FP8 KV cache (model.layers.0.self_attn, "
        "model.layers.1.self_attn); give kv_scale=1.0, by which all above 448 is cut off, or "
        "choose kv_cache_dtype='model', or calibrate the model"
    )
    store(folder, layers=(1,), k_scale=K)
    with pytest.raises(CheckpointError, match=r"1 of 2 .*layers\.0\.self_attn") as it:
        mount_reference(folder, kv_cache=PER_TENSOR)
    assert "kv_scale=" not in str(it.value), "it would be refused"


def test_a_scale_that_is_given_does_not_replace_those_of_the_checkpoint(folder: Path) -> None:
    store(folder, layers=(1,), kv_scale=K)
    with pytest.raises(CheckpointError, match=r"kv_scale=1\.0 was given.*layers\.1.*leave kv_s"):
        mount_reference(folder, kv_cache=KVCache(dtype=FP8, scale=1.0))


@pytest.mark.parametrize("others", [{"attn__k_scale": K}, {"kv_scale": K}])
def test_two_scales_for_one_use_are_refused(folder: Path, others: dict[str, float]) -> None:
    store(folder, k_scale=K, v_scale=V, **others)
    (other,) = others
    second = f"layers.0.self_attn.{other.replace('__', '.')} are scales for one use"
    with pytest.raises(CheckpointError, match=f"layers.0.self_attn.k_scale and model.{second}"):
        mount_reference(folder, kv_cache=PER_TENSOR)


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_is_finite_and_above_0(folder: Path, value: float) -> None:
    store(folder, k_scale=K, v_scale=V)
    store(folder, layers=(1,), v_scale=value)
    with pytest.raises(CheckpointError) as refused:
        mount_reference(folder, kv_cache=PER_TENSOR)
    assert "model.layers.1.self_attn.v_scale in model.safetensors" in str(refused.value)
    assert str(value) in str(refused.value)


@pytest.mark.parametrize(
    ("cache", "change", "rule"),
    [
        (
            PER_TENSOR,
            {"k_scale": [K, K]},
            r"k_scale in .* has shape \[2\] and must have \[1\], one scale",
        ),
        (
            PER_HEAD,
            {"v_scale": V},
            r"v_scale in .* has shape \[\] and must have \[2\], one for each",
        ),
        (PER_HEAD, {"v_scale": [[V, V], [V, V]]}, r"shape \[2, 2\]"),
        (PER_HEAD, {"v_scale": []}, r"shape \[0\]"),
        (PER_TENSOR, {"k_scale": 3}, "k_scale in .* is int64; a scale is one of"),
        (PER_TENSOR, {"k_zero_point": 1}, "k_zero_point in .* must be 0"),
    ],
)
def test_what_is_no_scale_is_refused_by_name(
    folder: Path, cache: KVCache, change: dict[str, Any], rule: str
) -> None:
    shape = (2,) if cache is PER_HEAD else ()
    store(folder, k_scale=torch.full(shape, K), v_scale=torch.full(shape, V))
    store(folder, layers=(1,), **change)
    with pytest.raises(CheckpointError, match=f"model.layers.1.self_attn.*{rule}"):
        mount_reference(folder, kv_cache=cache)
