"""Linear kernel "triton-int4": weights in groups of 4 or 8 bits, inputs in 16."""

from rackmount_quant.kernels.linear import QuantizedLinear
from rackmount_quant.kernels.packed import Packed, pack_groups
from rackmount_registry.formats import Weight


class GroupedLinear(QuantizedLinear):
    """For "int4_groups" and "int8_groups"; columns out of order (act-order) too."""

    def pack(self, weight: Weight) -> Packed:
        return pack_groups(weight)
