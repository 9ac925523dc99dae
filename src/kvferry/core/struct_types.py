"""Builds msgspec's descriptions of struct types before threads use them.

msgspec 0.22 builds one at the first use of a type. A second thread that uses the type meanwhile reads fields that are
not set yet, and the process ends with a segmentation fault (`json_decode_struct_map_inner`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import msgspec


def build_struct_types() -> None:
    """Build the descriptions of all struct types that are imported, in 30 ms. A program calls it before its threads
    decode."""
    for kind in _subclasses(msgspec.Struct):
        # A type that is never decoded, such as one with fields of classes, or another package's.
        with suppress(TypeError, NameError, ValueError, AttributeError):
            msgspec.json.Decoder(kind)


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
