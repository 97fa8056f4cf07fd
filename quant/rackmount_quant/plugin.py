"""What this distribution offers: readers of `quantization_config`."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import QuantizationScheme


@hookimpl
def quantization_schemes() -> list[QuantizationScheme]:
    return [
        QuantizationScheme(
            name="w8",
            factory="rackmount_quant.w8:W8Scheme",
            summary="int8 rows, one scale each, rounded to nearest",
            claims=("w8",),
        )
    ]
