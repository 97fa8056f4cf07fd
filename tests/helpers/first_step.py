"""What an engine on Triton alone would compile, found without a GPU and without compiling. Run as a
program, in a process of its own: the tests' own interprets kernels.

Usage: python -m tests.helpers.first_step CASE...: prints for each a JSON object with two lists of
what kernels are specialized for, "ahead" of the first launch and "launched" by steps of many sizes.
Nothing is computed: what kernels would write is whatever is there.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from tests.helpers.engines import greedy, rows, tokens_of
from tests.helpers.mounting import plugins
from tests.helpers.specializations import Found, recorded, report
from torch import Tensor
from torch.nn import functional

from rackmount import Engine, SamplingParams
from rackmount.execution import worker
from rackmount.sampling import sampler
from rackmount_backends.plugin import attention_backends, linear_kernels, op_sets
from rackmount_backends.triton_linear.linear import TritonLinear
from rackmount_backends.triton_linear.tuning import Tiling
from rackmount_backends.triton_ops.op_set import TRITON_OPS
from rackmount_moe import plugin as moe
from rackmount_registry import hookimpl
from rackmount_registry.mount import Mounted, fill_randomly
from rackmount_registry.plugins import PluginManager

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1250,
    "max_position_embeddings": 1200,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "torch_dtype": "bfloat16",
    "eos_token_id": 5,
}
QWEN3: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": True,
}
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama with an FP8 cache": (LLAMA, {"kv_cache_dtype": "fp8", "kv_scale": 1.0}),
    "llama with biases": (LLAMA | {"attention_bias": True}, {}),
    "qwen3-moe": (QWEN3, {}),
}
"""A model's config and an engine's arguments."""


LENGTHS = (
    *((n,) for n in (1, 2, 3, 5, 12, 30, 50, 100, 200, 300, 1000)),
    *((2,) * n for n in (2, 4, 8, 16, 40)),
    (3, 700, 600, 20),
    tuple(range(1, 41)),
)
"""Of prompts that are given together."""
PARAMS = (
    greedy(3),
    SamplingParams(max_tokens=2, logit_bias={7: 1.0}, logprobs=3),
    greedy(1, prompt_logprobs=1),
)
BLOCK, CHUNK = 7, 101
"""Rows that are processed at once, and prompt tokens whose logits are held: what begins behind some
is not aligned."""
BEFORE_WEIGHTS = (
    *("build_batch", "penalize", "survey", "choose", "survey_logprobs", "logprobs"),
    *("_decode", "_prefill"),
)
"""Kernels that follow from the engine's arguments and the model's config alone."""
PATIENCE_S = 60.0


class Sample:
    """The op of the set `triton`, but for tokens that exist."""

    prepare = staticmethod(TRITON_OPS.sample.prepare)

    def __call__(self, *arguments: Any) -> Tensor:
        return TRITON_OPS.sample(*arguments).fill_(1)


OPS = SimpleNamespace(**vars(TRITON_OPS) | {"sample": Sample()})


def linear() -> TritonLinear:
    """Few rows by its own kernel, which the tensor memory accelerator feeds for some, and products
    of 32 rows by cuBLAS."""

    def choose(weight: Tensor, epilogue: str, bucket: int) -> Tiling | None:
        return None if bucket == 32 else Tiling(32, 64, 2, 3, 4, prefetch=2, tma=bucket > 8)

    return TritonLinear(choose)


def on_cpu(descriptor: Any, factory: str = "") -> Any:
    """The part, as if it ran here."""
    open_cells = tuple(
        replace(each, devices=("cpu",), compute_capability=None) for each in descriptor.cells
    )
    return replace(
        descriptor,
        name=f"{descriptor.name}-here",
        factory=factory or descriptor.factory,
        requires=(),
        band="vendor",
        cells=open_cells,
    )


def parts_here() -> PluginManager:
    """All parts in Triton that serve plain weights."""

    def named(descriptors: list[Any], start: str) -> Any:
        return next(each for each in descriptors if each.name.startswith(start))

    parts = SimpleNamespace(
        attention_backends=hookimpl(lambda: [on_cpu(named(attention_backends(), "triton"))]),
        linear_kernels=hookimpl(
            lambda: [on_cpu(named(linear_kernels(), "triton"), f"{__name__}:linear")]
        ),
        op_sets=hookimpl(
            lambda: [
                on_cpu(named(op_sets(), "triton"), f"{__name__}:OPS"),
                on_cpu(named(moe.op_sets(), "triton")),
            ]
        ),
        expert_kernels=hookimpl(lambda: [on_cpu(named(moe.expert_kernels(), "triton"))]),
    )
    return plugins() + PluginManager.from_modules({"here": parts})


def wait_for_early(found: Found) -> None:
    """Until those kernels are in the compiler's hands.

    Raises:
        TimeoutError: one is not.
    """
    until = time.monotonic() + PATIENCE_S
    while missing := [
        name for name in BEFORE_WEIGHTS if not any(name in each for each in found["ahead"])
    ]:
        if time.monotonic() > until:
            raise TimeoutError(f"{missing} do not compile while weights load")
        time.sleep(0.01)


def launch_all(folder: Path, **arguments: Any) -> Found:
    """Prompts and decodes of one token to hundreds, alone and together, plain and processed, with
    log-probabilities and without."""
    functional.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight))
    with recorded() as found:

        def fill(mounted: Mounted, seed: int) -> None:
            wait_for_early(found)
            fill_randomly(mounted, seed)

        worker.fill_randomly = fill
        sampler.BLOCK_LOGITS = BLOCK * LLAMA["vocab_size"]
        worker.MAX_PROMPT_LOGITS = CHUNK * LLAMA["vocab_size"]
        with Engine(
            folder,
            manager=parts_here(),
            auto_plugins=("here",),
            load_format="dummy",
            num_kv_blocks=400,
            max_num_seqs=40,
            max_num_batched_tokens=1024,
            **arguments,
        ) as engine:
            attention = engine.rack.attention
            assert attention.prefill.name == attention.decode.name == "triton-here"
            for lengths in LENGTHS:
                prompts = rows(*lengths)
                for params in PARAMS:
                    tokens_of(engine, prompts, params)
    return found


def search(case: str) -> Found:
    config, arguments = CASES[case]
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return launch_all(Path(folder), **arguments)


if __name__ == "__main__":
    report(search, sys.argv[1:])
