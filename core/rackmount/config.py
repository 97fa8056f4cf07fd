"""What an engine is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from rackmount_registry.errors import ConfigError, did_you_mean
from rackmount_registry.plain import misfits

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
POLICIES = ("fcfs", "priority")
LOAD_FORMATS = ("auto", "dummy")
KV_CACHE_DTYPES = ("auto", "model", "fp8")
OTHER_NAMES = {
    "attention_backend": "backend",
    "tensor_parallel_size": "tp",
    "data_parallel_size": "dp",
    "num_gpu_blocks_override": "num_kv_blocks",
}
"""What arguments are called elsewhere -> here."""
LEAST = {
    "max_model_len": 2,  # a prompt of one token, and one of output
    "num_kv_blocks": 1,
    "kv_cache_memory_bytes": 1,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "max_graph_tokens": 0,
    "seed": 0,
    "tp": 1,
    "dp": 1,
    "ep": 1,
}
"""Smallest legal values."""
COUNTED_IN_INT32 = ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens")
MOST = 2**31 - 1
"""Of those."""
LEAST_SCALE, MOST_SCALE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Normal numbers of float32."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Arguments of `Engine`, as given; None and "auto" are resolved when the rack is drafted."""

    model: str
    """An alias, a hub id, or a path to a folder or file."""
    backend: str = "auto"
    """Attention backend."""
    dtype: str = "auto"
    """Of weights and activations; "auto" is the checkpoint's own."""
    device: str = "auto"
    """"cpu", "cuda" or "cuda:N"; "auto" is the first GPU, else the CPU. Ranks of "cuda" have a GPU
    each."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together; None is what the model claims to know."""
    num_kv_blocks: int | None = None
    """Blocks of the KV pool; None is what `kv_cache_memory_bytes` holds."""
    kv_cache_memory_bytes: int | None = None
    """On each rank. None is what `gpu_memory_utilization` leaves on a GPU, half of the free memory
    and 4 GiB at most on a CPU; no more than all sequences at full length need."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's whole memory that may be in use: by weights, activations, graphs and KV of
    this engine, and by whoever else is there."""
    kv_cache_dtype: str = "auto"
    """"model" is that of activations, "fp8" float8_e4m3fn; "auto" is what the checkpoint says, or
    "model"."""
    kv_scale: float | None = None
    """Of keys and values in an FP8 cache, for checkpoints that bring no scales: what is stored is
    their quotient, cut off at 448."""
    block_size: int | None = None
    """Tokens per KV block; None is the backend's preference."""
    max_num_seqs: int = 256
    """Most requests in one step."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step; 0 leaves that to the budget."""
    scheduling_policy: str = "fcfs"
    """"fcfs", or "priority": lower numbers first."""
    enable_prefix_caching: bool = True
    enable_mixed_steps: bool | None = None
    """Compute prompts beside tokens that are decoded; otherwise first, by themselves, as long as
    they fill steps and the pool has room for running requests as well: batches then decode in full,
    for more tokens a second, and answers pause while many prompts arrive. None is True where
    requests come from outside, in an `AsyncEngine` and so in servers, and where they have
    priorities; False else in an `Engine`, which works through what it is given."""
    enforce_eager: bool = False
    """Capture no CUDA graphs."""
    max_graph_tokens: int | None = None
    """Most tokens of a step with prompts that is a CUDA graph. Larger ones run eagerly, which is no
    slower where the device takes longer to run them than the host to launch them: None is where
    that should be on an H200, by the size of the model's layers, from 256 to 2048. A step between
    two sizes runs as the larger one, up to half as large again; each size takes its time to
    capture, and memory."""
    async_scheduling: bool | None = None
    """Schedule the next step while one runs; None is on GPUs alone."""
    load_format: str = "auto"
    """"auto" reads the checkpoint; "dummy" fills the model of a config.json with random weights."""
    seed: int = 0
    """Where the seeds of requests without one come from."""
    quantization: str | None = None
    """Quantization scheme; None is what the checkpoint says. Of a plain checkpoint, one that rounds
    its weights while they are loaded."""
    expert_kernel: str = "auto"
    linear_kernel: str = "auto"
    op_set: str = "auto"
    token_dispatcher: str = "auto"
    auto_plugins: tuple[str, ...] = ()
    """Distributions outside the project whose parts "auto" may choose."""
    plugin_config: tuple[str, ...] = ()
    """Options of parts, each "kind.name.key=value"."""
    trust_remote_code: bool = False
    """Run code that comes with a checkpoint (its tokenizer's)."""
    tp: int = 1
    """Ranks that split every layer."""
    dp: int = 1
    ep: int = 1
    grammar_backend: str = "auto"
    """What keeps answers to grammars."""
    executor: str = "auto"
    """How ranks run; "auto" is this process for one, and a process for each of several."""

    @classmethod
    def create(cls, **given: Any) -> Self:
        """From keyword arguments, `model` a path, too.

        Raises:
            TypeError: an unknown keyword; the nearest legal one is named.
            ConfigError: a value out of range.
        """
        legal = [field.name for field in fields(cls)]
        for name in given:
            if name not in legal:
                hint = did_you_mean(OTHER_NAMES.get(name, name), legal)
                raise TypeError(
                    f"Engine got an unknown argument {name!r}{hint}; legal are {', '.join(legal)}"
                )
        model = given.get("model")
        return cls(**given | ({"model": str(model)} if isinstance(model, Path) else {}))

    def __post_init__(self) -> None:
        if wrong := "; ".join(misfits(self, EngineConfig, "Engine")):
            raise ConfigError(wrong)
        if not self.model:
            raise ConfigError("model='' must be an alias, a hub id (owner/name), or a path")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
            if value is not None and name in COUNTED_IN_INT32 and value > MOST:
                raise ConfigError(f"{name}={value} must be at most {MOST}")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.kv_scale is not None and not LEAST_SCALE <= self.kv_scale <= MOST_SCALE:
            legal = f"from {LEAST_SCALE:.1e} to {MOST_SCALE:.1e}"
            raise ConfigError(f"kv_scale={self.kv_scale} must be a number of float32, {legal}")
        if not 0 < self.gpu_memory_utilization <= 1:
            given = self.gpu_memory_utilization
            raise ConfigError(f"gpu_memory_utilization={given} must be above 0 and at most 1")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_kv_blocks={self.num_kv_blocks} and "
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} are two sizes of the KV pool; "
                "give one"
            )
        for name in ("dp", "ep"):
            if getattr(self, name) != 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not supported; choose {name}=1")

    @property
    def mixes_steps(self) -> bool:
        """`enable_mixed_steps`, resolved as for an `Engine`."""
        if self.enable_mixed_steps is None:
            return self.scheduling_policy == "priority"
        return self.enable_mixed_steps

    @property
    def requested_parts(self) -> Mapping[str, str]:
        """Kind -> name asked for, of the parts that the mount chooses."""
        kinds = ("expert_kernel", "linear_kernel", "op_set", "token_dispatcher")
        return {kind: getattr(self, kind) for kind in kinds}


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ConfigError(
            f"{name}={value!r}{did_you_mean(value, legal)} must be one of {', '.join(legal)}"
        )
