"""How the bytes of a block are written down at rest or on a link: as they are, or smaller.

A codec belongs to one tier or link, and is made for one layout. It works on spans (one block of one layer). What it is
given to decode has been verified by checksum, yet whoever wrote it may mean ill: lengths inside are not to be trusted.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar

from kvferry.core.layout import KVLayout

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,15}")
"""Of a codec: it is in the header of each block, and in names of folders and keys."""


class CodecError(Exception):
    """Encoded bytes that cannot be decoded. Does not leave the store: the block counts as corrupt."""


class Codec(ABC):
    """Encodes and decodes the spans of one layout. Safe for several threads."""

    name: ClassVar[str]
    """What users say, and what a stored block's header says, as `NAME` allows."""

    lossless: ClassVar[bool]
    """Whether decoding gives the same bits. A lossy codec is used only where it is asked for by name."""

    def __init__(self, layout: KVLayout) -> None:
        """Raises `ConfigError` when spans of this layout cannot be encoded (packing, dtype)."""
        self.layout = layout

    @abstractmethod
    def encode(self, span: memoryview, layer: int) -> bytes | memoryview:
        """The span's bytes, encoded. May return `span` itself."""

    @abstractmethod
    def decode(self, encoded: memoryview, layer: int, into: memoryview) -> None:
        """Fill `into`, as long as the layout says, and no more. Raises `CodecError`."""

    @abstractmethod
    def max_encoded_bytes(self, layer: int) -> int:
        """No encoded span of this layer is longer."""
