"""Op set "triton": what `TRITON_OPS` offers equals the definitions in `rackmount_registry.ops`.

Inputs may be views of wider tensors whose last dimension is contiguous. Arithmetic is in float32
and rounds where the definitions round.
"""

from types import SimpleNamespace

from rackmount_backends.triton_ops.activation import silu_mul
from rackmount_backends.triton_ops.batch import build_batch
from rackmount_backends.triton_ops.embedding import embedding
from rackmount_backends.triton_ops.logprobs import logprobs
from rackmount_backends.triton_ops.norm import add_rms_norm, rms_norm
from rackmount_backends.triton_ops.penalties import penalize
from rackmount_backends.triton_ops.rotary import rotary_write
from rackmount_backends.triton_ops.sampling import sample

TRITON_OPS = SimpleNamespace(
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    rotary_write=rotary_write,
    embedding=embedding,
    build_batch=build_batch,
    penalize=penalize,
    sample=sample,
    logprobs=logprobs,
)
