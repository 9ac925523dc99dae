"""What a user may write into `kv_connector_extra_config` of the shared storage connector."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class SharedStorageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `kv_connector_extra_config`. The docstring under each is its meaning in the reference."""

    shared_storage_path: str
    """Directory that all instances share. Required."""

    max_bytes: Annotated[int, Meta(ge=0)] = 0
    """Largest size of the directory in bytes; blocks are removed beyond it, the longest unused first. 0: no limit but
    the disk's."""

    load: Literal["async", "layerwise"] = "async"
    """`async`: a request waits until all its blocks are read. `layerwise`: the model starts at once, and each layer
    waits for its own blocks; one rank only."""

    timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds to wait for a hand-off's prefill, and for the blocks of one request."""

    fsync: bool = False
    """Write blocks through to the disk before they are announced, so that they survive a power failure."""

    access: Literal["owner", "group"] = "owner"
    """Who may read and write the files: this user alone, or its group too (as far as the umask allows)."""
