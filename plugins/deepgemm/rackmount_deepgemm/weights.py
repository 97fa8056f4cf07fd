"""What DeepGEMM can take of a weight in the format "fp8_blocks"."""

from torch import Tensor

from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import BLOCK, Weight


def values_and_scales(weight: Weight) -> tuple[Tensor, Tensor]:
    """Values [.., out, in] and scales [.., out / 128, in / 128] as loaded.

    Raises:
        ConfigError: sizes that are no multiples of 128, or input that must not be rounded.
    """
    if weight.in_features % BLOCK or any(rows % BLOCK for rows in weight.parts):
        rows = " and ".join(map(str, weight.parts))
        raise ConfigError(
            f"deepgemm takes weights of whole blocks of {BLOCK} x {BLOCK}, not of {rows} x "
            f"{weight.in_features}; choose another kernel"
        )
    if weight.activation != "group":
        raise ConfigError(
            f"deepgemm rounds its input to FP8 by groups of {BLOCK}, and the checkpoint's scheme "
            f"says {weight.activation!r}; choose another kernel"
        )
    return weight.tensors["values"], weight.tensors["scales"]
