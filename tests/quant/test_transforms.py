"""Transforms of compressed-tensors: queries and keys may be mapped, and nothing else."""

import re
from typing import Any

import pytest
from compressed_tensors.transform import TransformConfig
from tests.helpers.schemes import read_scheme

from rackmount_quant.compressed_tensors import CompressedTensorsScheme
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import KVCacheScheme

UP = "model.layers.0.mlp.up_proj"


def scheme(**changes: Any) -> CompressedTensorsScheme:
    """Of a KV cache alone."""
    given = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    return read_scheme(CompressedTensorsScheme, given | changes)


def transforms(**changes: Any) -> dict[str, Any]:
    """Maps of layer 0 by name, and of layers 1 and 12 by a pattern."""
    where = {"0": "model.layers.0.self_attn", "more": r"re:.*layers\.(1|12)\.self_attn$"}
    groups = {
        f"{side}{key}": {
            "type": "random-matrix",
            "apply": [{"targets": [target], "location": location, "inverse": False}],
            "head_dim": 64,
            "precision": "torch.float32",
        }
        for key, target in where.items()
        for side, location in (("q", "q_attn"), ("k", "k_cache"))
    }
    groups["q0"] |= changes
    return {"config_groups": groups}


def mapping(**changes: Any) -> CompressedTensorsScheme:
    kv_cache = {"num_bits": 8, "type": "float"}
    return scheme(kv_cache_scheme=kv_cache, transform_config=transforms(**changes))


def test_queries_and_keys_may_be_mapped() -> None:
    kv_cache = mapping().kv_cache
    assert kv_cache is not None and kv_cache.per == "tensor" and kv_cache.key_map_names is not None
    path = "model.layers.{}.self_attn"
    names = {layer: kv_cache.key_map_names(path.format(layer)) for layer in (0, 1, 2, 12, 20)}
    more = ("qmore_q_attn.weight", "kmore_k_cache.weight")
    assert names == {
        0: ("q0_q_attn.weight", "k0_k_cache.weight"),
        1: more,
        2: None,
        12: more,
        20: None,
    }


def test_maps_come_in_pairs() -> None:
    for target in ("model.layers.1.self_attn", "model.layers.2.self_attn"):
        apply = [{"targets": [target], "location": "q_attn"}]
        kv_cache = mapping(apply=apply).kv_cache
        assert kv_cache is not None and kv_cache.key_map_names is not None
        with pytest.raises(ConfigError, match=r"must map .* by one matrix at each of q_attn and"):
            kv_cache.key_map_names(target)


def test_a_library_reads_maps_alike() -> None:
    TransformConfig.model_validate(transforms())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "hadamard"}, "type='hadamard' must be 'random-matrix'"),
        ({"randomize": True}, "randomize=True must be False"),
        ({"apply": {}}, "apply={} must be a list of objects"),
        ({"apply": ["q_attn"]}, "apply=['q_attn'] must be a list of objects"),
        (
            {"apply": [{"location": "q_attn", "targets": []}]},
            "config_groups: q0: apply[0]: targets",
        ),
        ({"apply": [{"location": "weight_input", "targets": ["a.b"]}]}, "location='weight_input'"),
        ({"apply": [{"location": "q_attn", "targets": ["a.b"], "inverse": True}]}, "inverse=True"),
        ({"apply": [{"location": "q_attn", "targets": ["Attention"]}]}, "must name modules"),
        ({"apply": [{"location": "q_attn", "targets": ["a.b"], "ignore": ["a"]}]}, "ignore=['a']"),
        ({"apply": [{"location": "q_attn", "targets": ["a.b"], "by": 1}]}, "does not read by"),
        ({"block": 3}, "does not read block"),
    ],
)
def test_other_transforms_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        mapping(**changes)


def test_maps_are_of_no_use_without_a_quantized_cache() -> None:
    with pytest.raises(ConfigError, match="maps keys, and no kv_cache_scheme is there"):
        scheme(transform_config=transforms())


@pytest.mark.parametrize("nothing", [None, {}, {"config_groups": {}}, {"config_groups": None}])
def test_no_transforms_are_none(nothing: Any) -> None:
    kv_cache = scheme(
        kv_cache_scheme={"num_bits": 8, "type": "float"}, transform_config=nothing
    ).kv_cache
    assert kv_cache == KVCacheScheme()


def test_targets_of_maps_that_mean_nothing_are_told() -> None:
    chosen = mapping(apply=[{"targets": ["layers.0.attention"], "location": "q_attn"}])
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    unmet = chosen.unmet([*modules, UP, "lm_head"])
    assert unmet == ["layers.0.attention"]
