"""What this distribution offers: plain torch parts that every other is held to, kernels in Triton,
and attention of vendors."""

from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import AttentionBackend, LinearKernel, OpSet, Requirement

DTYPES = ("float32", "bfloat16", "float16", "float64")
NARROW = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"
QUANTIZED = ("int8_rows", "fp8_rows", "fp8_blocks", "int4_groups", "int8_groups")
"""All weight formats but "dense"."""
TRITON = (Requirement(module="triton", install="pip install 'triton>=3.6'"),)
OPS = (
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "rotary_write",
    "embedding",
    "build_batch",
    "penalize",
    "sample",
    "logprobs",
)
"""What both op sets have."""

TORCH_ATTENTION = AttentionBackend(
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
            kv_dtypes=(dtype, FP8),
            features=frozenset({"sliding_window", "head_scales"}),
        )
        for dtype in DTYPES
    ),
)

TRITON_ATTENTION = AttentionBackend(
    name="triton",
    factory="rackmount_backends.triton_attention.backend:TritonAttention",
    summary="paged decode with split keys and paged prefill, in Triton",
    requires=TRITON,
    band="portable",
    graph_safe=True,
    cache_layout="slots",
    preferred_block_sizes=(16, 32, 64, 128),
    metadata="device",
    cells=(
        *(
            Cell(
                devices=("cuda",),
                compute_capability=(8, 0),
                dtypes=(dtype,),
                kv_dtypes=(dtype,),
                head_sizes=tuple(range(16, 257, 16)),
                block_sizes=(16, 32, 64, 128, 256),
                features=frozenset({"sliding_window", "soft_cap"}),
            )
            for dtype in ("bfloat16", "float16", "float32")
        ),
        Cell(
            devices=("cuda",),
            compute_capability=(8, 9),  # the first to convert FP8
            dtypes=NARROW,
            kv_dtypes=(FP8,),
            head_sizes=tuple(range(32, 257, 16)),
            block_sizes=(16, 32, 64, 128, 256),
            features=frozenset({"sliding_window", "soft_cap", "head_scales"}),
        ),
    ),
)

FLASH_ATTN = AttentionBackend(
    name="flash-attn",
    factory="rackmount_backends.flash_attn:FlashAttention",
    summary="FlashAttention 4, kernels in CuTe DSL for Hopper and Blackwell",
    requires=(
        Requirement(
            module="flash_attn.cute",
            install="pip install flash-attn-4==4.0.0b36 quack-kernels==0.6.5 "
            "'nvidia-cutlass-dsl[cu13]==4.8.1'",
        ),
    ),
    band="vendor",
    order=1,
    decode_order=None,  # below 10.0 it does not split a sequence's keys
    graph_safe=True,
    cache_layout="slots",
    preferred_block_sizes=(16, 32, 64),
    metadata="device",
    jit="rackmount_backends.flash_attn:missing_kernels",
    cells=tuple(
        Cell(
            devices=("cuda",),
            compute_capability=(9, 0),
            compute_capability_below=(12, 0),
            dtypes=(dtype,),
            kv_dtypes=(dtype,),
            head_sizes=head_sizes,
            # A page of exactly one key tile is read whole, what was never written included.
            block_sizes=block_sizes,
            features=frozenset({"sliding_window", "soft_cap"}),
        )
        for dtype in NARROW
        for head_sizes, block_sizes in (
            ((64, 80, 96, 112, 128), (16, 32, 64, 256)),
            ((256,), (16, 32)),
        )
    ),
)

FLASHINFER = AttentionBackend(
    name="flashinfer",
    factory="rackmount_backends.flashinfer.backend:FlashInfer",
    summary="FlashInfer's paged kernels, compiled with nvcc at first use",
    requires=(
        Requirement(
            module="flashinfer",
            install="pip install flashinfer-python==0.6.14 apache-tvm-ffi==0.1.11",
        ),
    ),
    band="vendor",
    order=None,  # on an H200 the others were faster at most loads, above all at mixed ones
    decode_order=None,
    graph_safe=True,
    cache_layout="slots",
    preferred_block_sizes=(16, 32, 64, 128),
    metadata="host",
    cells=tuple(
        Cell(
            devices=("cuda",),
            compute_capability=capability,
            dtypes=(dtype,),
            kv_dtypes=(kv_dtype,),
            head_sizes=(64, 128, 256),
            features=frozenset({"sliding_window", "soft_cap"}),
        )
        for dtype in NARROW
        for capability, kv_dtype in (((8, 0), dtype), ((8, 9), FP8))
    ),
)


@hookimpl
def attention_backends() -> list[AttentionBackend]:
    return [TORCH_ATTENTION, TRITON_ATTENTION, FLASH_ATTN, FLASHINFER]


@hookimpl
def op_sets() -> list[OpSet]:
    return [
        OpSet(
            name="torch",
            factory="rackmount_backends.torch_ops:TORCH_OPS",
            summary="plain torch, fewer passes than the definitions",
            band="reference",
            ops=(*OPS, "gate", "norm_gate"),
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES),),
        ),
        OpSet(
            name="triton",
            factory="rackmount_backends.triton_ops.op_set:TRITON_OPS",
            summary="one kernel for each operation, in Triton",
            requires=TRITON,
            band="portable",
            graph_safe=True,
            ops=OPS,
            cells=tuple(
                Cell(
                    devices=("cuda",),
                    compute_capability=capability,
                    dtypes=("float32", "bfloat16", "float16"),
                    kv_dtypes=kv_dtypes,
                )
                for capability, kv_dtypes in (((8, 0), DTYPES), ((8, 9), (FP8,)))
            ),
        ),
    ]


@hookimpl
def linear_kernels() -> list[LinearKernel]:
    return [
        LinearKernel(
            name="torch",
            factory="rackmount_backends.torch_linear:DenseLinear",
            summary="torch's linear",
            band="reference",
            graph_safe=True,
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES, weight_formats=("dense",)),),
        ),
        LinearKernel(
            name="triton",
            factory="rackmount_backends.triton_linear.linear:TritonLinear",
            summary="few rows in Triton on GPUs where that was measured, else cuBLAS",
            requires=TRITON,
            band="portable",
            graph_safe=True,
            epilogues=("silu_mul", "add"),
            cells=(
                Cell(
                    devices=("cuda",),
                    compute_capability=(8, 0),
                    dtypes=NARROW,
                    weight_formats=("dense",),
                ),
            ),
        ),
        LinearKernel(
            name="dequantize",
            factory="rackmount_backends.torch_linear:DequantizedLinear",
            summary="torch's linear on weights that are dequantized in every call",
            band="reference",
            graph_safe=True,
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES, weight_formats=QUANTIZED),),
        ),
    ]
