"""What crosses between the engine core and the program of a rank."""

import msgspec
import numpy as np

from rackmount.config import EngineConfig
from rackmount.execution.expert_load import ExpertLoad
from rackmount.sampling.request import TokenLogprobs
from rackmount.scheduling.plan import StepPlan
from rackmount_registry.manifest import ManifestEntry

MAX_IN_FLIGHT = 2
"""Steps that the engine core has under way at most."""


class RankSetup(msgspec.Struct, array_like=True, tag=True):
    """What a rank needs to draft the same rack."""

    config: EngineConfig
    path: str
    """The model's, as every host finds it."""
    manifest: tuple[ManifestEntry, ...]
    """What the driver mounted."""


class Load(msgspec.Struct, array_like=True, tag=True):
    """Read the weights of this rank."""


class Loaded(msgspec.Struct, array_like=True, tag=True):
    num_kv_blocks: int
    """That this rank has room for."""
    weight_bytes_read: int


class Carve(msgspec.Struct, array_like=True, tag=True):
    """Take the memory of the KV pool: no more blocks than the rank with the least room has."""

    num_kv_blocks: int


class Carved(msgspec.Struct, array_like=True, tag=True):
    kv_bytes: int
    saturation: list[tuple[float, float, float, float]] = []
    """Of an FP8 cache; see `rackmount.execution.saturation`."""
    num_tried: int = 0
    """Tokens that it was measured with."""


class ReadExpertLoad(msgspec.Struct, array_like=True, tag=True):
    """Tell how many tokens each expert has had."""


class ExpertLoads(msgspec.Struct, array_like=True, tag=True):
    layers: list[ExpertLoad]


class StepResult(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """What a step brings back to the engine core."""

    token_ids: np.ndarray
    """int32 [S], for the rows that sample, in the order of the plan."""
    failed: list[str] = []
    """Requests whose logits leave no token to sample: NaN, or every token banned."""
    logprobs: dict[str, TokenLogprobs] = {}
    """Of the sampled token, by request."""
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}
    """By request: position of the first prompt token that they are of, and one for each from
    there."""


Message = (
    RankSetup
    | Load
    | Loaded
    | Carve
    | Carved
    | StepPlan
    | StepResult
    | ReadExpertLoad
    | ExpertLoads
)
