"""Messages as msgpack: typed on both sides, so that no byte that is read can run code."""

from typing import Any

import msgspec
import numpy as np

from rackmount.execution.messages import Message

DTYPES = tuple(map(np.dtype, ("int32", "int64", "bool")))
"""Of the arrays in messages; a msgpack extension's code is its place here."""


class MessageCodec:
    """A `rackmount_registry.executor.Codec` of `Message`, or of another union of structs."""

    def __init__(self, messages: Any = Message) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_flatten)
        self._decoder = msgspec.msgpack.Decoder(messages, ext_hook=_restore)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> Any:
        """ValidationError where the bytes are no message."""
        return self._decoder.decode(data)


def _flatten(value: Any) -> Any:
    """One-dimensional arrays, the one type in messages that msgspec does not know."""
    assert isinstance(value, np.ndarray) and value.ndim == 1, f"{type(value)} in a message"
    return msgspec.msgpack.Ext(DTYPES.index(value.dtype), np.ascontiguousarray(value).data)


def _restore(code: int, data: memoryview) -> np.ndarray:
    return np.frombuffer(data, DTYPES[code]).copy()  # torch takes no array that it may not write
