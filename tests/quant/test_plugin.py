"""What the distribution offers: each scheme is found by the name that checkpoints use."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.helpers.mounting import plugins
from tests.helpers.schemes import read_scheme

from rackmount_registry.descriptors import QuantizationScheme

LEAST: Mapping[str, Mapping[str, Any]] = {
    "awq": {"bits": 4},
    "gptq": {"bits": 4},
    "compressed-tensors": {
        "format": "float-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": {"type": "float"}}},
    },
    "fp8": {},
    "modelopt": {"quant_algo": "FP8"},
    "w8": {},
}
"""Method -> the least that a configuration says."""


@pytest.mark.parametrize("method", LEAST)
def test_a_checkpoints_method_finds_its_scheme(method: str) -> None:
    descriptor = plugins().claimed(QuantizationScheme, method)
    assert descriptor.name == method
    scheme = read_scheme(descriptor.load(), {"quant_method": method, **LEAST[method]})
    stored = scheme.format_for("model.layers.0.mlp.up_proj", (128, 128), "linear")
    assert stored.encode is not None and scheme.kv_cache is None


GROUP = {"weights": {"type": "float"}}
VAIN: Mapping[str, Mapping[str, Any]] = {
    "awq": {"modules_to_not_convert": ["up_proj", "visual"]},
    "gptq": {
        "dynamic": {r"-:.*\.up_proj": {}, r"+:.*\.visual": {"bits": 8}},
        "modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.upproj"]],
    },
    "compressed-tensors": {
        "ignore": ["lm_head", "visual"],
        "config_groups": {
            "a": GROUP | {"targets": ["Linear", "re:.*up_proj", "re:.*vproj"]},
            "b": GROUP | {"targets": ["mlp.up_proj", "mlp.upproj"]},
        },
    },
    "fp8": {"modules_to_not_convert": ["lm_head"], "ignored_layers": ["mlp.up_proj", "visual"]},
    "modelopt": {"exclude_modules": ["*up_proj", "*visual*"]},
    "w8": {"ignore": ["re:.*up_proj", "visual"]},
}
"""Method -> lists with entries that mean the weights below, and others."""
UNMET = {
    "gptq": [r"+:.*\.visual", "mlp.upproj"],
    "compressed-tensors": ["visual", "re:.*vproj", "mlp.upproj"],
    "modelopt": ["*visual*"],
}


@pytest.mark.parametrize("method", LEAST)
def test_every_list_tells_which_of_its_entries_mean_nothing(method: str) -> None:
    config = {"quant_method": method, **LEAST[method], **VAIN[method]}
    scheme = read_scheme(plugins().claimed(QuantizationScheme, method).load(), config)
    found = scheme.unmet(["model.layers.0.mlp.up_proj", "lm_head"])
    assert sorted(found) == sorted(UNMET.get(method, ["visual"]))


def test_fp8_alone_rounds_plain_checkpoints() -> None:
    offers = plugins().offers(QuantizationScheme)
    online = {o.name: o for o in offers if o.descriptor.online and o.name in LEAST}
    assert list(online) == ["fp8"]
    stored = online["fp8"].load()(None).format_for("mlp.up_proj", (8, 8), "linear")
    assert stored.yields == "fp8_rows"
