"""The gated feed-forward block."""

from torch import Tensor, nn

from rackmount_registry.axes import Axis
from rackmount_registry.formats import Rounded
from rackmount_registry.nn.linear import Gemm, Linear, MergedLinear
from rackmount_registry.nn.socket import Binding, Socket


class SiluMul(Socket):
    """silu(gate) * up."""

    uses = frozenset({"silu_mul"})
    by_row = True
    reader: Gemm | None = None
    """The product that alone reads the result, and can round it; set by the mount."""

    def bind(self, binding: Binding) -> None:
        self.ops = binding.ops

    def forward(self, gate: Tensor, up: Tensor) -> Tensor | Rounded:
        if self.reader is not None and self.reader.rounds(len(gate)):
            return self.reader.round_silu_mul(gate, up)
        return self.ops.silu_mul(gate, up)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x) (SwiGLU, arXiv 2002.05202), stored as gate_proj, up_proj and
    down_proj under its path.

    No leaf: the mount sees its edges, so that the activation can be fused with either product.
    """

    def __init__(self, hidden: int, ffn: Axis, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden, {"gate_proj": ffn, "up_proj": ffn}, bias=bias)
        self.act = SiluMul()
        self.down_proj = Linear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down_proj(self.act(gate, up))  # type: ignore[no-any-return]  # nn.Module calls are Any
