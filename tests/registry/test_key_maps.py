"""Maps of queries and keys before an FP8 cache: read by layer, and held to change no score."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.checkpoints import edit_tensors, random_ids, tiny_checkpoint
from tests.helpers.mounting import mount_reference
from tests.helpers.ranks import Member, ThreadGroup
from torch import Tensor

from rackmount_registry.attention import FP8, KVCache
from rackmount_registry.axes import Mesh
from rackmount_registry.errors import CheckpointError
from rackmount_registry.mount.draw import fill_randomly

SIZE = 128
IDS = random_ids(20)
NAMES = ("to.q", "to.k")
MAPPED = "model.layers.1.self_attn"


def key_map_names(name: str) -> tuple[str, str] | None:
    """Of the second layer alone."""
    assert name.startswith("model.layers.") and name.endswith(".self_attn")
    return NAMES if name == MAPPED else None


CACHE = KVCache(dtype=FP8, scale=0.01, key_map_names=key_map_names)


def pair(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Far from rotations: features grow by up to 4."""
    random = torch.Generator().manual_seed(0)
    k = torch.randn(SIZE, SIZE, generator=random, dtype=torch.float64)
    k = torch.linalg.qr(k).Q * torch.logspace(-2, 2, SIZE, base=2, dtype=torch.float64)
    return torch.linalg.inv(k).T.to(dtype), k.to(dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers, the second with maps."""
    folder = tiny_checkpoint(tmp_path / "model", "qwen3")[0]
    return store(folder, *pair())


def store(folder: Path, *maps: Tensor | None) -> Path:
    def change(tensors: dict[str, Tensor]) -> None:
        for name, matrix in zip(NAMES, maps, strict=True):
            if matrix is None:
                del tensors[f"{MAPPED}.{name}"]
            else:
                tensors[f"{MAPPED}.{name}"] = matrix

    edit_tensors(folder, change)
    return folder


def test_queries_and_keys_are_mapped_and_scores_stay(folder: Path) -> None:
    wide = {"dtype": torch.float64}
    reference = mount_reference(folder, kv_cache=CACHE, **wide)
    plain, mapped = reference.mounted.draft.attention
    assert plain.key_maps is None
    for found, matrix in zip((mapped.key_maps.q, mapped.key_maps.k), pair(), strict=True):
        assert found.dtype == torch.float64 and torch.equal(found, matrix.double())
    exact = mount_reference(folder, kv_cache=own(), **wide).logits(IDS)
    found = reference.logits(IDS)
    mapped.key_maps = None
    unmapped = reference.logits(IDS)
    assert not torch.equal(found, unmapped)
    for logits in (found, unmapped):
        assert 0 < (logits - exact).std() < 0.1 * exact.std()


def own() -> KVCache:
    return KVCache(dtype=torch.float64, ignores_scales=True, key_map_names=key_map_names)


def test_a_cache_of_the_models_dtype_needs_no_maps_and_answers_for_them(folder: Path) -> None:
    reference = mount_reference(folder, kv_cache=own())
    assert all(layer.key_maps is None for layer in reference.mounted.draft.attention)
    with pytest.raises(CheckpointError, match="2 tensors of the checkpoint are neither used"):
        mount_reference(folder, kv_cache=KVCache(dtype=torch.float32))


def test_every_rank_has_the_whole_maps(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(
        tmp_path, "qwen3", head_dim=SIZE, num_attention_heads=4, num_key_value_heads=2
    )
    store(folder, *pair())
    one = mount_reference(folder, dtype=torch.float64, kv_cache=CACHE)
    group = ThreadGroup(2)

    def mount(member: Member) -> object:
        mesh = Mesh.tensor_parallel(member)
        return mount_reference(folder, dtype=torch.float64, mesh=mesh, kv_cache=CACHE)

    ranks = [mount(member) for member in group.members]
    for logits in group.run(lambda rank: ranks[rank].logits(IDS)):
        torch.testing.assert_close(logits, one.logits(IDS), rtol=0, atol=1e-10)


def test_random_weights_come_with_maps_that_map_to_the_same(folder: Path) -> None:
    mounted = mount_reference(folder, kv_cache=CACHE).mounted
    plain, mapped = mounted.draft.attention
    mapped.key_maps = None
    fill_randomly(mounted, 0)
    assert plain.key_maps is None
    for found in (mapped.key_maps.q, mapped.key_maps.k):
        assert torch.equal(found, torch.eye(SIZE))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_maps_have_any_float_type(folder: Path, dtype: torch.dtype) -> None:
    store(folder, *pair(dtype))
    mapped = mount_reference(folder, kv_cache=CACHE).mounted.draft.attention[1]
    assert torch.equal(mapped.key_maps.k, pair(dtype)[1].float())


def with_nan(x: Tensor) -> Tensor:
    x[3, 4] = math.nan
    return x


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda q, k: (q, None), r"names model\.layers\.1\.self_attn\.to\.k, which is not in"),
        (lambda q, k: (q[:64], k), r"to\.q in model\.safetensors is float32 \[64, 128\] and must"),
        (lambda q, k: (q, k.to(FP8)), r"to\.k in .* is float8_e4m3fn \[128, 128\] and must be one"),
        (lambda q, k: (q, k.T.contiguous()), "must be the identity to 0.001, or scores would"),
        (lambda q, k: (q, 1.01 * k), r"to\.q times .*to\.k must be .* off by 0\.01"),
        (lambda q, k: (with_nan(q), k), "off by nan"),
    ],
)
def test_maps_that_would_change_scores_are_refused(
    folder: Path, spoil: Callable[..., tuple[Tensor | None, ...]], message: str
) -> None:
    store(folder, *spoil(*pair()))
    with pytest.raises(CheckpointError, match=message):
        mount_reference(folder, kv_cache=CACHE)


def test_a_scale_of_values_does_not_serve_mapped_keys(folder: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.02])

    edit_tensors(folder, add)
    cache = KVCache(dtype=FP8, key_map_names=key_map_names)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_scale is not in the check"):
        mount_reference(folder, kv_cache=cache)
