"""What this distribution offers: products of FP8 weights with block scales, on Hopper.

Weights that are not of whole blocks, or whose scheme rounds inputs otherwise, are refused when the
kernel gets them, after loading: capabilities have no column for either.
"""

from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell, ExpertLayout
from rackmount_registry.descriptors import ExpertKernel, LinearKernel, Requirement

REQUIRES = (
    Requirement(module="deep_gemm", install="pip install sgl-deep-gemm==0.1.4.post1"),
    Requirement(module="triton", install="pip install 'triton>=3.6'"),
)
SUMMARY = "FP8 with block scales by DeepGEMM, compiled with nvcc at first use; rounds its input"


def _cell(layouts: tuple[ExpertLayout, ...] | None = None) -> Cell:
    return Cell(
        devices=("cuda",),
        compute_capability=(9, 0),
        compute_capability_below=(10, 0),  # later GPUs want scales that are powers of two
        dtypes=("bfloat16",),
        weight_formats=("fp8_blocks",),
        layouts=layouts,
    )


@hookimpl
def linear_kernels() -> list[LinearKernel]:
    return [
        LinearKernel(
            name="deepgemm",
            factory="rackmount_deepgemm.linear:DeepGemmLinear",
            summary=SUMMARY,
            requires=REQUIRES,
            band="vendor",
            order=None,  # it compiles while a model runs, for every shape
            graph_safe=True,
            cells=(_cell(),),
        )
    ]


@hookimpl
def expert_kernels() -> list[ExpertKernel]:
    return [
        ExpertKernel(
            name="deepgemm",
            factory="rackmount_deepgemm.experts:DeepGemmExperts",
            summary=SUMMARY,
            requires=REQUIRES,
            band="vendor",
            order=None,
            graph_safe=True,
            cells=(_cell(layouts=("contiguous", "batched", "batched_fp8")),),
        )
    ]
