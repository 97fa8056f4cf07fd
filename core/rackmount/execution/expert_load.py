"""How busy the experts of each layer have been."""

import msgspec
import numpy as np


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """Of one layer, since the engine started. Padding is not counted."""

    layer: str
    tokens: np.ndarray
    """int64 [experts]: how many tokens chose each, of those that the layer computed: the last one
    leaves out what nobody reads, most of a prompt."""

    @property
    def num_used(self) -> int:
        """Experts that any token chose."""
        return int(np.count_nonzero(self.tokens))

    @property
    def busiest(self) -> int:
        """The expert with most tokens."""
        return int(self.tokens.argmax())

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert over the mean of all: 1 is even; 0 before there were any."""
        return float(self.tokens.max() / max(self.tokens.mean(), 1e-9))
