"""A name for a checkpoint as an engine runs it: its configuration as the engine has resolved it, and the content of its
files.

Two instances have the same name if they compute with the same weights and configuration, wherever their files are, and
different names if a single weight or setting differs. Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import wait
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import xxhash

from kvferry.core.errors import ConfigError
from kvferry.core.runtime.threads import ThreadPool
from kvferry.models.digest_cache import SETTLED_S, DigestCache, FileState

CHUNK_BYTES = 8 * 2**20
NUM_THREADS = 4

HARMLESS_FILES = (
    *("config.json", "params.json"),  # the configuration counts as the engine has resolved it
    *(
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model*",
        "special_tokens_map.json",
    ),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "tekken.json", "*.tiktoken", "chat_template.*"),
    *("*.jinja", "*.md", "LICENSE*", "NOTICE*", ".*"),
)
"""Files of a checkpoint that KV does not depend on. All others count, because it is not known which of them an engine
reads."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack")
"""A checkpoint is identified by its files only if it has one of these."""
HARMLESS_SETTINGS = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation_autoset"})
"""Settings that differ between copies of one configuration."""
_COMMIT = re.compile(r"[0-9a-f]{40}")

ReadProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) from time to time if reading takes more than a second."""


def ignore(done: int, total: int) -> None:
    """A `ReadProgress` that does nothing."""


def checkpoint_name(
    model: str | Path,
    *,
    config: Mapping[str, Any],
    dtype: str,
    revision: str | None = None,
    changes: Mapping[str, Any] | None = None,
    weights: str = "",
    before: CheckpointFiles | None = None,
    on_progress: ReadProgress = ignore,
    reader: DigestReader | None = None,
) -> str:
    """The fingerprint of a checkpoint run in `dtype` (such as "float32"): 32 hexadecimal digits.

    `model`: a folder, a file, or an id on the hub, at `revision`. `config`: the model's configuration as the engine has
    resolved it (`resolved_config`). `changes`: other settings of the engine on which the KV depends. `weights`: a name
    for the weights, which are then not read. `before`: the files before the weights were loaded. `reader`: reads the
    files of the weights; `DigestReader()` by default.

    Raises `OSError` if a file cannot be read, and `ConfigError` if neither files on this machine nor a commit on the
    hub identify the weights, or if files have changed since `before` or while they were read.
    """
    if not weights:
        weights = _weights(str(model), revision, before, reader or DigestReader(), on_progress)
    facts = [dtype, plain(config), plain(changes or {}), weights]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _weights(
    model: str,
    revision: str | None,
    before: CheckpointFiles | None,
    reader: DigestReader,
    on_progress: ReadProgress,
) -> Any:
    files = CheckpointFiles.of(model, revision)
    if before is not None:
        before.require_same(files)
    digests = reader.digests_of(files.states, on_progress)
    if any(name.endswith(WEIGHT_SUFFIXES) for name, _ in digests):
        files.require_same(CheckpointFiles.of(model, revision))
        return digests
    commit = getattr(revision, "resolved", revision)  # of `huggingface_hub.ResolvedRevision`
    if commit is not None and _COMMIT.fullmatch(commit) and not Path(model).exists():
        return [model, commit]
    raise ConfigError(
        f"the weights of {model!r} are not in files on this machine, so they cannot be distinguished from other"
        " weights of the same name; give them a name of their own, the same on all instances (model_fingerprint)"
    )


def local_checkpoint(model: str, revision: str | None = None) -> Path | None:
    """The folder or file on this machine with the checkpoint. None if there is none (a streamed checkpoint)."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


# The configuration.


def resolved_config(config: Any) -> dict[str, Any]:
    """All settings of a transformers configuration except harmless ones, with its class, and with the version of code
    that comes from another repository on the hub than the checkpoint."""
    settings = plain(config)
    kind = type(config)
    settings["class"] = kind.__qualname__
    if "--" in json.dumps(settings.get("auto_map")):
        settings["code"] = kind.__module__  # it contains the commit
    return dict(settings)


def plain(value: Any) -> Any:
    """A setting's value as JSON types, the same in every process. Raises `ConfigError` if it has no such form."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Enum():
            return [type(value).__qualname__, plain(value.value)]
        case Mapping():
            return {str(key): plain(inner) for key, inner in value.items() if key not in HARMLESS_SETTINGS}
        case Set():
            return sorted((plain(inner) for inner in value), key=repr)
        case Sequence():
            return [plain(inner) for inner in value]
        case type():
            return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path) or type(value).__module__ == "torch":  # a dtype, a device
        return str(value)
    raise ConfigError(
        f"the configuration contains {value!r}, which has no name that is the same on all instances; give the model"
        " one (model_fingerprint)"
    )


# The files.


@dataclass(frozen=True)
class CheckpointFiles:
    """The state of a checkpoint's files at one time, without files that are known to be irrelevant. A loader takes it
    before and after the load. Only if nothing has changed in between, the fingerprint describes the loaded weights."""

    model: str
    path: Path | None
    """None: the files are not on this machine (yet)."""
    states: Mapping[str, FileState]

    @classmethod
    def of(cls, model: str, revision: str | None = None) -> CheckpointFiles:
        """The state of the files now. Waits until each later change would change their times: usually 50 ms, at most
        five times 2 s. A file that still changes then is returned as it was. Raises `OSError`."""
        for _ in range(5):
            path = local_checkpoint(model, revision)
            states = file_states(path) if path is not None else {}
            wait_s = max((state.unsettled_s() for state in states.values()), default=0.0)
            if not wait_s:
                break
            time.sleep(wait_s)
        return cls(model, path, states)

    def require_same(self, now: CheckpointFiles) -> None:
        """Raise `ConfigError` if a file was changed, added or removed between this state and `now`. Files of a model
        from the hub may be added."""
        if self.path is None:
            return
        names = self.states.keys() | (now.states.keys() if Path(self.model).expanduser().exists() else set())
        changed = sorted(name for name in names if self.states.get(name) != now.states.get(name))
        if changed:
            others = f" and {len(changed) - 1} other files" if changed[1:] else ""
            raise ConfigError(
                f"{changed[0]}{others} of {self.model!r} changed while the model was loaded, so it is unknown which"
                " version was loaded; start again when the checkpoint is complete, and put a new checkpoint into a"
                " directory of its own"
            )


def file_states(root: Path) -> dict[str, FileState]:
    """The files of a checkpoint or an adapter, without files that are known to be irrelevant, by their path within
    `root`. Raises `OSError`."""
    return {name: FileState.of(path) for name, path in _files(root)}


def file_digest(path: Path, on_read: Callable[[int], None]) -> str:
    """The digest of a file's content. `on_read`: called with the number of bytes of each chunk. Raises `OSError`."""
    hasher, buffer = xxhash.xxh3_128(), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            hasher.update(view[:num_read])
            on_read(num_read)
    digest: str = hasher.hexdigest()
    return digest


@dataclass(frozen=True)
class DigestReader:
    """Finds digests of files in the user's cache, and reads the other files."""

    first_report_s: float = 1.0
    report_interval_s: float = 2.0
    """Seconds until the first report of progress, and between two."""
    settled_s: float = SETTLED_S
    """A digest is cached only if its file has not changed for at least these seconds."""
    digest: Callable[[Path, Callable[[int], None]], str] = file_digest

    def digests_of(self, states: Mapping[str, FileState], on_progress: ReadProgress = ignore) -> list[tuple[str, str]]:
        """(name, digest) of each of these files, ordered by name. Raises `OSError`."""
        digests = DigestCache().find_all(states.values())
        if any(state not in digests for state in states.values()):
            with DigestCache.locked() as cache:  # all ranks of an instance reach this at the same time
                digests |= cache.find_all(states.values())
                missing = list({state for state in states.values() if state not in digests})
                new_digests = dict(zip(missing, self._read_all(missing, on_progress), strict=True))
                cache.store(new_digests, self.settled_s)
                digests |= new_digests
        return [(name, digests[state]) for name, state in sorted(states.items())]

    def _read_all(self, states: Sequence[FileState], on_progress: ReadProgress) -> list[str]:
        chunk_sizes: list[int] = []
        num_bytes = sum(state.size for state in states)
        with ThreadPool(NUM_THREADS, name="kvferry-digest") as pool:
            reads = [pool.submit(self.digest, Path(state.path), chunk_sizes.append) for state in states]
            timeout_s = self.first_report_s
            while wait(reads, timeout_s).not_done:
                on_progress(sum(chunk_sizes), num_bytes)
                timeout_s = self.report_interval_s
            return [read.result() for read in reads]


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """(path within `root`, path) of each file that counts, or of `root` itself if it is a file."""
    if root.is_file():
        yield root.name, root
        return
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        seen.add(real)
        for name in names:
            path = Path(folder, name)
            if not any(fnmatch(name, pattern) for pattern in HARMLESS_FILES) and path.is_file():
                yield str(path.relative_to(root)), path
