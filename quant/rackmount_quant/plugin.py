"""What this distribution offers: readers of `quantization_config`, and kernels in Triton."""

from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import LinearKernel, QuantizationScheme, Requirement


@hookimpl
def quantization_schemes() -> list[QuantizationScheme]:
    return [
        QuantizationScheme(
            name="awq",
            factory="rackmount_quant.awq:AwqScheme",
            summary="4-bit groups as AutoAWQ packs them",
            claims=("awq",),
        ),
        QuantizationScheme(
            name="gptq",
            factory="rackmount_quant.gptq:GptqScheme",
            summary="groups of 4 or 8 bits as GPTQModel packs them, act-order too",
            claims=("gptq",),
        ),
        QuantizationScheme(
            name="compressed-tensors",
            factory="rackmount_quant.compressed_tensors:CompressedTensorsScheme",
            summary="integers and FP8 as llm-compressor saves them",
            claims=("compressed-tensors",),
        ),
        QuantizationScheme(
            name="fp8",
            factory="rackmount_quant.fp8:Fp8Scheme",
            summary="FP8 by tensor or block; rounds plain checkpoints by channel",
            claims=("fp8",),
            online=True,
        ),
        QuantizationScheme(
            name="modelopt",
            factory="rackmount_quant.modelopt:ModelOptScheme",
            summary="FP8 as NVIDIA ModelOpt saves it",
            claims=("modelopt",),
        ),
        QuantizationScheme(
            name="w8",
            factory="rackmount_quant.w8:W8Scheme",
            summary="int8 rows, one scale each, rounded to nearest",
            claims=("w8",),
        ),
    ]


def _linear_kernel(
    name: str, factory: str, summary: str, formats: tuple[str, ...], prologues: tuple[str, ...] = ()
) -> LinearKernel:
    return LinearKernel(
        name=name,
        factory=factory,
        summary=summary,
        requires=(Requirement(module="triton", install="pip install 'triton>=3.6'"),),
        band="portable",
        graph_safe=True,
        epilogues=("silu_mul", "add"),
        prologues=prologues,
        cells=(
            Cell(
                devices=("cuda",),
                compute_capability=(8, 0),
                dtypes=("bfloat16", "float16"),
                weight_formats=formats,
            ),
        ),
    )


@hookimpl
def linear_kernels() -> list[LinearKernel]:
    return [
        _linear_kernel(
            "triton-int4",
            "rackmount_quant.kernels.grouped:GroupedLinear",
            "few rows in Triton, many by cuBLAS on the dequantized weight",
            ("int4_groups", "int8_groups"),
        ),
        _linear_kernel(
            "triton-fp8",
            "rackmount_quant.kernels.fp8:Fp8Linear",
            "few rows in Triton, many rounded to FP8 as the scheme says",
            ("fp8_rows", "fp8_blocks"),
            ("norm", "silu_mul"),
        ),
        _linear_kernel(
            "triton-int8",
            "rackmount_quant.kernels.int8:Int8Linear",
            "few rows in Triton, many rounded to int8 as the scheme says",
            ("int8_rows",),
            ("norm", "silu_mul"),
        ),
    ]
