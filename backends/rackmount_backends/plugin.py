"""What this distribution offers: the plain torch parts that every other backend is held to."""

from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import AttentionBackend, LinearKernel, OpSet

DTYPES = ("float32", "bfloat16", "float16", "float64")


@hookimpl
def attention_backends() -> list[AttentionBackend]:
    return [
        AttentionBackend(
            name="torch",
            factory="rackmount_backends.torch_attention:TorchAttention",
            summary="torch's scaled_dot_product_attention over gathered pages",
            band="reference",
            cache_layout="slots",
            preferred_block_sizes=(16, 32, 64, 128),
            cells=tuple(
                Cell(
                    devices=("cpu", "cuda"),
                    dtypes=(dtype,),
                    kv_dtypes=(dtype,),
                    features=frozenset({"sliding_window"}),
                )
                for dtype in DTYPES
            ),
        )
    ]


@hookimpl
def op_sets() -> list[OpSet]:
    return [
        OpSet(
            name="torch",
            factory="rackmount_backends.torch_ops:TORCH_OPS",
            summary="plain torch, fewer passes than the definitions",
            band="reference",
            ops=("rms_norm", "add_rms_norm", "silu_mul", "rotary", "embedding", "route"),
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES),),
        )
    ]


@hookimpl
def linear_kernels() -> list[LinearKernel]:
    return [
        LinearKernel(
            name="torch",
            factory="rackmount_backends.torch_linear:DenseLinear",
            summary="torch's linear",
            band="reference",
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES, weight_formats=("dense",)),),
        ),
        LinearKernel(
            name="torch-int8",
            factory="rackmount_backends.torch_linear:DequantizedLinear",
            summary="torch's linear on weights that are dequantized in every call",
            band="reference",
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES, weight_formats=("int8_rows",)),),
        ),
    ]
