"""Block hashes: names of blocks by their content.

A block hash is the SHA-256 of (hash of the block before it, the block's token ids). For the first block, the hash
before it is the *root*, the hash of (model fingerprint, cache salt). Two requests therefore share a block only if
model, salt and every token up to and including the block are the same, and a collision cannot be constructed. The chain
is vLLM's idea (prefix caching); the model and SHA-256 are always part of it here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
"""SHA-256 of a block's tokens and of all blocks before it: 32 bytes."""


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Eight bytes for each token. An array of unsigned integers has the same bytes as one of signed integers, and is
    made in a tenth of the time."""
    try:
        return array("Q", token_ids).tobytes()
    except OverflowError:  # negative ones
        return array("q", token_ids).tobytes()


def root_hash(model_fingerprint: str, cache_salt: str = "") -> BlockHash:
    """The hash before a sequence's first block."""
    digest = hashlib.sha256()
    for part in (b"kvferry-block-v1", model_fingerprint.encode(), cache_salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def next_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block with `token_ids` behind the block `parent`."""
    return hashlib.sha256(parent + token_bytes(token_ids)).digest()


def extend_hashes(hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of those full blocks of `token_ids` that `hashes` does not have yet."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(next_hash(parent, token_ids[start : start + block_size]))
