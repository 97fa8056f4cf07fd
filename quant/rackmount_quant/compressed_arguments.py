"""Arguments of compressed-tensors' config groups: how weights are stored and inputs rounded.

| weights | in the format | become |
| --- | --- | --- |
| int of 8 bits, symmetric, by channel or tensor | int-, naive-quantized | int8_rows |
| other int of 4 or 8 bits | pack-, int-, naive-quantized | int4_groups, int8_groups |
| float of 8 bits by channel or tensor | float-, naive-quantized | fp8_rows |
| float of 8 bits by block of 128 x 128 | float-, naive-quantized | fp8_blocks |

Products round their input only where that is of the weights' own type, and symmetric. Elsewhere it
stays as it is, which is more exact than what was asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rackmount_quant.eight_bits import fp8_blocks, fp8_rows, int8_rows
from rackmount_quant.integers import Integers, integer_format
from rackmount_quant.settings import CALIBRATION, choice, group_size, nested, refuse_groups
from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import BLOCK, Activation, Dim, Slot, StoredFormat

PACKED = "pack-quantized"
STORED_AS = {
    PACKED: ["int"],
    "int-quantized": ["int"],
    "float-quantized": ["float"],
    "naive-quantized": ["int", "float"],
}
"""Format -> types of numbers that it stores."""

ACT_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
"""Whether columns are stored out of the order of their groups. True alone once meant "group"."""

INPUT_SCALE = Slot("input_scale", (Dim("part"),), "float32")
INPUT_ZERO_POINT = Slot("input_zero_point", (Dim("part"),), "int8")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """How a product's input is to be rounded."""

    type: Literal["int", "float"]
    symmetric: bool
    activation: Activation
    slots: tuple[Slot, ...]
    """What a static scale is stored as."""

    def matching(
        self, kind: str, legal: Sequence[Activation]
    ) -> tuple[Activation, tuple[Slot, ...]]:
        """How products with weights of a type round, of what `legal` lists; and the tensors that
        are not used for it."""
        if self.type == kind and self.symmetric and self.activation in legal:
            return self.activation, ()
        return "plain", self.slots


AS_THEY_ARE = Inputs(type="float", symmetric=True, activation="plain", slots=())


def read_inputs(group: ConfigReader) -> Inputs | None:
    """`input_activations` of a config group; None where there are none.

    Raises:
        ConfigError: other than 8 bits, static scales for anything but whole tensors, or unknown
            keys.
    """
    args = nested(group, "input_activations")
    if args is None:
        return None
    choice(args, "num_bits", [8], 8)
    kind = choice(args, "type", ["int", "float"], "int")
    symmetric = choice(args, "symmetric", [True] if kind == "float" else [True, False], True)
    dynamic = choice(args, "dynamic", [True, False], False)
    refuse_groups(args, "actorder", "block_structure")
    columns = args.get("group_size")
    strategies = ["token", "tensor", "group"] if dynamic else ["tensor"]
    strategy = choice(args, "strategy", strategies, "tensor" if columns is None else "group")
    if strategy != "group":
        refuse_groups(args, "group_size")
    args.require_all_read(CALIBRATION)
    activation: Activation = "token"
    if strategy == "group":
        activation = "group" if columns == BLOCK else "plain"
    if dynamic:
        return Inputs(type=kind, symmetric=symmetric, activation=activation, slots=())
    slots = (INPUT_SCALE,) if symmetric else (INPUT_SCALE, INPUT_ZERO_POINT)
    return Inputs(type=kind, symmetric=symmetric, activation="tensor", slots=slots)


def read_weights(
    args: ConfigReader, form: str, inputs: Inputs | None
) -> tuple[Callable[[tuple[int, int]], StoredFormat], int]:
    """`weights` of a config group.

    Returns:
        What gives the format of a weight by its shape [out, in], and of what its columns must be a
        multiple.

    Raises:
        ConfigError: types, bits, strategies and combinations of them that are not read, or unknown
            keys.
    """
    kind = choice(args, "type", STORED_AS[form], "int")
    bits = choice(args, "num_bits", [8] if kind == "float" else [4, 8], 8)
    symmetric = choice(args, "symmetric", [True] if kind == "float" else [True, False], True)
    choice(args, "dynamic", [False], False)
    strategies = ["tensor", "channel", "block" if kind == "float" else "group"]
    columns = args.get("group_size")
    implied = "tensor" if columns is None else "channel" if columns == -1 else "group"
    strategy = choice(args, "strategy", strategies, implied)
    act_order = choice(args, "actorder", [None, True, False, *ACT_ORDERS])
    block = args.get("block_structure")
    args.require_all_read(CALIBRATION)
    if strategy == "block" and block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise args.error("block_structure", f"must be [{BLOCK}, {BLOCK}]")
    rounding = inputs or AS_THEY_ARE
    if strategy == "block":
        activation, unused = rounding.matching(kind, ["group"])
        return _always(fp8_blocks(activation, ignored=unused)), 1
    if kind == "float" or (bits == 8 and symmetric and strategy != "group" and form != PACKED):
        activation, unused = rounding.matching(kind, ["token", "tensor"])
        rows = fp8_rows if kind == "float" else int8_rows
        return _always(rows(strategy, activation, ignored=unused)), 1
    group = group_size(args, "group_size") if strategy == "group" else -1
    integers = Integers(
        bits=bits,
        per=strategy,
        group=group,
        symmetric=symmetric,
        act_order=group != -1 and ACT_ORDERS.get(act_order, act_order is True),
        packed=form == PACKED,
    )
    stored = partial(integer_format, integers, ignored=rounding.slots)
    return stored, max(1, group)


def _always(stored: StoredFormat) -> Callable[[tuple[int, int]], StoredFormat]:
    return lambda shape: stored
