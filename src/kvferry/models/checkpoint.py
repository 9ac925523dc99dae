"""A name for a checkpoint: every byte of its weights, and its configuration, go into it.

So two instances, of whichever engine, have one name when they serve the same files, and two names when a single weight
differs. Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import xxhash

from kvferry.models.digest_cache import DigestCache, FileState

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack")
CONFIG_FILES = ("config.json", "params.json")
CHUNK_BYTES = 8 * 2**20
NUM_THREADS = 4
FIRST_REPORT_S, REPORT_EVERY_S = 1.0, 2.0
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation_autoset")

ReadProgress = Callable[[int, int], None]
"""(bytes read, bytes in all); called now and then where reading takes more than a second."""


def checkpoint_name(
    model: str | Path,
    *,
    dtype: str,
    revision: str | None = None,
    changes: Mapping[str, str] | None = None,
    with_weights: bool = True,
    on_progress: ReadProgress = lambda done, total: None,
) -> str:
    """32 hexadecimal digits for a checkpoint run in `dtype` ("float32").

    `model`: a folder, a file, or what the hub knows it by, of `revision`. `changes`: what else an engine was told that
    its KV depends on. Without weights (random ones, say) only the configuration counts, and `changes` should say where
    they are from. Of a checkpoint whose files are not on this machine the name stands for the files.

    Raises `OSError` when a file cannot be read.
    """
    place = checkpoint_place(str(model), revision)
    facts: list[Any] = [dtype, sorted((changes or {}).items())]
    if place is None:
        facts += ["not here", str(model), revision]
    else:
        facts.append([_config_of(place / name) for name in CONFIG_FILES])
        if with_weights:
            facts += _digests(_weight_files(place), on_progress)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def checkpoint_place(model: str, revision: str | None = None) -> Path | None:
    """Where its files are on this machine: a folder, or one file. None: nowhere (a streamed checkpoint)."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _config_of(path: Path) -> Any:
    """Without what differs from copy to copy."""
    if not path.is_file():
        return None
    settings = json.loads(path.read_bytes())
    return {key: value for key, value in settings.items() if key not in _VOLATILE}


def _weight_files(place: Path) -> list[Path]:
    """All of them: which of them an engine reads is its own affair. And code, which may come with a checkpoint."""
    if place.is_file():
        return [place]
    return sorted(path for path in place.iterdir() if path.suffix in (*WEIGHT_SUFFIXES, ".py") and path.is_file())


def _digests(paths: Sequence[Path], on_progress: ReadProgress) -> list[tuple[str, str]]:
    """Of each file its name and digest, known from before or read now."""
    states = {path: FileState.of(path) for path in paths}
    found = DigestCache().find_all(states.values())
    if missing := [path for path in paths if states[path] not in found]:
        with DigestCache.locked() as cache:  # the ranks of an instance come here together
            found |= cache.find_all(states[path] for path in missing)
            missing = [path for path in missing if states[path] not in found]
            digests = _read_all(missing, sum(states[path].size for path in missing), on_progress)
            read = {states[path]: digest for path, digest in zip(missing, digests, strict=True)}
            cache.keep(read)
            found |= read
    return [(path.name, found[states[path]]) for path in paths]


def _read_all(paths: Sequence[Path], num_bytes: int, on_progress: ReadProgress) -> list[str]:
    counted: list[int] = []
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvferry-digest") as pool:
        reads = [pool.submit(_digest, path, counted.append) for path in paths]
        timeout_s = FIRST_REPORT_S
        while wait(reads, timeout_s).not_done:
            on_progress(sum(counted), num_bytes)
            timeout_s = REPORT_EVERY_S
        return [read.result() for read in reads]


def _digest(path: Path, count: Callable[[int], None]) -> str:
    hasher, buffer = xxhash.xxh3_128(), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            hasher.update(view[:num_read])
            count(num_read)
    digest: str = hasher.hexdigest()
    return digest
