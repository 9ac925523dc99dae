"""The interface of codecs, which encode the bytes of a block for a store: unchanged or smaller.

A codec belongs to one tier, and is made for one layout. It works on spans (one block of one layer). The bytes that it
decodes were verified by checksum, but their writer may be malicious: do not trust lengths in them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar

from kvferry.core.blocks.layout import KVLayout

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,15}")
"""Valid codec names: the name is part of each block's header, and of the names of directories and keys."""


class CodecError(Exception):
    """Encoded bytes that cannot be decoded. Handled within the store: the block counts as corrupt."""


class Codec(ABC):
    """Encodes and decodes the spans of one layout. Any thread."""

    name: ClassVar[str]
    """The codec's name, for users and in the header of a stored block; must match `NAME`."""

    lossless: ClassVar[bool]
    """True if decoding gives the same bits. A lossy codec is used only if it is configured by name."""

    @classmethod
    def require_libraries(cls) -> None:
        """Raise `MissingDependency` if a library that it needs is not installed. Called before anything is started."""

    def __init__(self, layout: KVLayout) -> None:
        """Raises `ConfigError` if spans of this layout cannot be encoded (packing, dtype)."""
        self.layout = layout

    @abstractmethod
    def encode(self, span: memoryview, layer: int) -> bytes | memoryview:
        """The span, encoded. May return `span` itself."""

    @abstractmethod
    def decode(self, encoded: memoryview, layer: int, into: memoryview) -> None:
        """Decode to `into`, which has the span's length, and write nowhere else. Raises `CodecError`."""

    @abstractmethod
    def max_encoded_bytes(self, layer: int) -> int:
        """Maximum bytes of an encoded span of this layer."""
