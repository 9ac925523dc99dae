"""A name for the model whose KV this is, the same on every instance that serves the same weights.

vLLM's workers rearrange weights, each in its own way, so the name comes from the checkpoint: the configuration, and of
each tensor in the safetensors files its name, type, shape and a few bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 64
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation_autoset")


def model_fingerprint(vllm_config: Any) -> str:
    """32 hexadecimal digits."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    digest = hashlib.sha256()
    settings = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE}
    facts = [settings, str(model.dtype), model.quantization, str(cache.cache_dtype)]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    if vllm_config.load_config.load_format != "dummy":
        for sample in _tensor_samples(_checkpoint_folder(model.model, model.revision)):
            digest.update(sample)
    return digest.hexdigest()[:32]


def _checkpoint_folder(model: str, revision: str | None) -> Path | None:
    """Where the files are on this machine; None when they are nowhere (a remote or streamed checkpoint)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _tensor_samples(folder: Path | None) -> Iterator[bytes]:
    """Of each tensor, in the order of their names, however they are spread over files."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        found.update(_samples_of(path))
    for name in sorted(found):
        yield name.encode() + b"\0" + found[name]


def _samples_of(path: Path) -> dict[str, bytes]:
    samples: dict[str, bytes] = {}
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            first, last = tensor["data_offsets"]
            file.seek(start + first + (last - first) // 2)
            sample = file.read(min(SAMPLE_BYTES, (last - first) // 2))
            samples[name] = f"{tensor['dtype']}{tensor['shape']}".encode() + sample
    return samples
