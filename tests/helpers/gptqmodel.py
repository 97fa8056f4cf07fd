"""What `to_dict` of ModelCloud/GPTQModel's `quantization/config.py` gives, key for key: it is saved
as quantize_config.json, and as quantization_config of config.json."""

from collections.abc import Mapping
from typing import Any

META: Mapping[str, Any] = {
    "quantizer": ["gptqmodel:7.3.4"],
    "uri": "https://github.com/modelcloud/gptqmodel",
    "damp_percent": 0.05,
    "damp_auto_increment": 0.01,
    "static_groups": False,
    "true_sequential": True,
    "mse": 0.0,
    "gptaq": None,
    "foem": None,
    "act_group_aware": True,
    "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": None},
    "offload_to_disk": True,
    "offload_to_disk_path": "./gptqmodel_offload/pjkwqxzv-bmtrcyaw/",
    "pack_impl": "cpu",
    "gc_mode": "interval",
    "wait_for_submodule_finalizers": False,
    "auto_forward_data_parallel": True,
    "dense_vram_strategy": "exclusive",
    "dense_vram_strategy_devices": None,
    "moe_vram_strategy": "exclusive",
    "moe_vram_strategy_devices": None,
}
"""Notes of both methods."""

GPTQ: Mapping[str, Any] = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "lm_head": False,
    "method": "gptq",
    "quant_method": "gptq",
    "format": "gptq",
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {
        **META,
        "mock_quantization": False,
        "hessian": {"chunk_size": None, "chunk_bytes": None, "staging_dtype": "float32"},
    },
    "sym": True,
}

AWQ: Mapping[str, Any] = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "lm_head": False,
    "method": "awq",
    "quant_method": "awq",
    "format": "gemm",
    "checkpoint_format": "gemm",
    "pack_dtype": "int32",
    "meta": {
        **META,
        "preprocessors": [
            {"code": "smoother", "smooth": {"type": "mad", "group_size_threshold": 128, "k": 2.75}}
        ],
        "scale_search_chunked_activations": True,
    },
    "zero_point": True,
    "version": "gemm",
}

NOTES_OF_5: Mapping[str, Any] = {"pack_impl": "cpu"}
"""What versions 5.0 to 5.6 wrote beside `meta`, of either method."""

CHANGES_NUMBERS: Mapping[str, Any] = {
    "rotation": "hadamard",
    "adapter": {"name": "lora", "path": "eora", "rank": 64},
}
"""What changes products, and by which value."""
