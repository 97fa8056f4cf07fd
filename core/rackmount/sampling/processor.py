"""What changes logits before a draw, by what the host says of each row."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount_registry.ops import Ops


class LogitProcessor(ABC):
    """A table of the device whose rows the host sets: `on_device`, int32 [rows, width], as of the
    last `flush`. It stays where it is: a CUDA graph may read it.

    Args:
        neutral: int32 [width], what every row has until it is set: it changes nothing.
    """

    def __init__(self, num_rows: int, neutral: np.ndarray, device: torch.device) -> None:
        self.on_device = upload(neutral, device).repeat(num_rows, 1)
        self._neutral = neutral
        self._values = [neutral] * num_rows
        """What each row has, or has from the next flush on."""
        self._changed: set[int] = set()
        self.asked = np.zeros(num_rows, bool)
        """Rows whose values are not neutral."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: Tensor, ops: Ops) -> None:
        """Changes logits [R, V], float32 at least, in place, by what the rows [R] have: enqueued
        work alone, which may be captured, as long as the ops may."""

    def set(self, row: int, values: np.ndarray) -> None:
        """Gives the row values int32 [width], which stay as they are from here on. Those that it
        has already cost nothing."""
        old = self._values[row]
        if values is old:
            return
        self._values[row] = values
        if not np.array_equal(values, old):
            self._changed.add(row)
            self.asked[row] = not np.array_equal(values, self._neutral)

    def release(self, row: int) -> None:
        """The row asks for nothing."""
        self.set(row, self._neutral)

    def flush(self) -> None:
        """Brings the device up to date, in the order of its stream: what changed, in one copy."""
        if not self._changed:
            return
        rows = list(self._changed)
        packed = np.empty((len(rows), 1 + self._neutral.size), np.int32)
        packed[:, 0] = rows
        np.stack([self._values[row] for row in rows], out=packed[:, 1:])
        given = upload(packed, self.on_device.device)
        self.on_device[given[:, 0]] = given[:, 1:]
        self._changed.clear()  # last: what broke before is made up for
