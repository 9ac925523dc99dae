"""The salt of a request's block hashes: a text of everything that its KV depends on besides the model and the tokens.

It contains the client's `cache_salt`, the content of the LoRA adapter, and the content of images, videos and sounds.
Names are not trusted. vLLM's name of an adapter stays the same when its files are replaced. An image's name may come
from the client (`uuid`, or the `ImageID` of its EXIF data) or from a counter. Owns the state of the adapters that this
vLLM has loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from vllm.multimodal.hasher import MultiModalHasher
from vllm.platforms import current_platform

from kvferry.adapters.vllm.identity.fingerprint import changed_settings
from kvferry.core.errors import InvalidRequest
from kvferry.models.checkpoint import WEIGHT_SUFFIXES, DigestReader, file_states, local_checkpoint
from kvferry.models.digest_cache import FileState

logger = logging.getLogger(__name__)

_NAMED = "\0"
"""Prefix of the salt of a request that has more than a `cache_salt`."""


class Salts:
    """The salts of one engine's requests. Used from vLLM's scheduler thread only.

    `lora_config`: vLLM's configuration of adapters; None: there are no adapters.
    """

    max_logged = 256
    """Maximum number of reasons that are logged, because clients can cause any number of them."""

    def __init__(self, lora_config: Any = None) -> None:
        self._adapters = LoraAdapters()
        self._lora_settings = changed_settings(lora_config) if lora_config is not None else {}
        self._mixes_base = lora_config is not None and current_platform.is_cpu() and computes_base_with_adapters()
        self._logged: set[str] = set()
        if lora_config is not None:
            _watch_loads(self._adapters)

    def of(self, request: Any) -> str | InvalidRequest:
        """The salt of vLLM's `Request`. If the KV depends on something that cannot be identified, returns the reason
        instead: such KV must be neither reused nor handed off. Logs each reason once."""
        try:
            return self._of(request)
        except InvalidRequest as error:
            return self._log_once(error)

    def uncertainty(self, lora: Any) -> InvalidRequest | None:
        """The reason why the content of a request's adapter is uncertain; None if it is certain."""
        try:
            self._adapters.content(lora)
        except InvalidRequest as error:
            return self._log_once(error)
        return None

    def _log_once(self, error: InvalidRequest) -> InvalidRequest:
        if (text := str(error)) not in self._logged and len(self._logged) < self.max_logged:
            self._logged.add(text)
            logger.warning("%s", text)
        return error

    def _of(self, request: Any) -> str:
        if request.prompt_embeds is not None:
            raise InvalidRequest("the KV of prompts with embeddings is neither reused nor handed off")
        if request.resumable:
            raise InvalidRequest("the KV of requests whose prompts grow is neither reused nor handed off")
        facts: list[Any] = []
        if request.lora_request is not None:
            lora = request.lora_request
            facts.append([self._adapters.content(lora), self._lora_settings, lora.is_3d_lora_weight])
        elif self._mixes_base:
            raise InvalidRequest(
                "with LoRA on CPUs, this vLLM computes requests for the base model with an adapter's weights if there"
                " are both in one batch: the base model's KV is neither reused nor handed off"
            )
        facts += [_multimodal_facts(feature) for feature in request.mm_features or ()]
        salt = request.cache_salt or ""
        return _NAMED + json.dumps([salt, *facts]) if facts or salt.startswith(_NAMED) else salt


def _multimodal_facts(feature: Any) -> list[Any]:
    """The identity of an image, video or audio clip of a prompt: the input tensors of the model, and their position."""
    data = feature.data
    if data is None or "address" in data:  # with the processor cache in shared memory, only a worker has them
        raise InvalidRequest(
            "the KV of prompts with images, videos or sounds is neither reused nor handed off, since vLLM does not"
            " pass their content on; use --mm-processor-cache-type lru"
        )
    content = MultiModalHasher.hash_kwargs("blake3", item={name: data[name].data for name in sorted(data)})
    return [feature.modality, feature.mm_position.offset, feature.mm_position.length, content]


# LoRA adapters.


def computes_base_with_adapters() -> bool:
    """True if vLLM's LoRA in PyTorch, used on CPUs, applies the last adapter to the rows of a batch that have none
    (number -1), as vLLM 0.32 does."""
    from vllm.lora.ops.torch_ops import bgmv_expand

    result = torch.zeros(1, 1)
    bgmv_expand(torch.ones(1, 1), torch.ones(1, 1, 1, 1), result, torch.tensor([-1]))
    return bool(result.any())


@dataclass(frozen=True)
class _Content:
    """The files of an adapter at the time of reading."""

    states: Mapping[str, FileState]
    digest: str


class LoraAdapters:
    """The content of the adapters that vLLM has loaded.

    vLLM loads an adapter under a number, on demand or with the first request for it, and possibly again later, from a
    path whose files may have been replaced. Its prefix cache knows an adapter by its name and path. So the content of a
    name and path is certain as long as its files do not change, and no other adapter has its number. Otherwise it stays
    uncertain in this process.
    """

    def __init__(self) -> None:
        self._contents: dict[tuple[str, str], _Content] = {}
        self._numbers: dict[int, Any] = {}
        self._uncertain: dict[tuple[str, str], str] = {}

    def content(self, lora: Any) -> str:
        """A digest of an adapter's files. `lora`: vLLM's `LoRARequest`. Raises `InvalidRequest` if it is uncertain that
        vLLM computes with these files."""
        key = (lora.lora_name, lora.lora_path)
        earlier = self._numbers.setdefault(lora.lora_int_id, lora)
        if (earlier.lora_name, earlier.lora_path) != key:
            self._replace_adapter(lora, earlier)
        self._read(key)
        if key in self._uncertain:
            raise InvalidRequest(
                f"the KV of LoRA adapter {lora.lora_name!r} ({lora.lora_path}) is neither reused nor handed off:"
                f" {self._uncertain[key]}"
            )
        return self._contents[key].digest

    def _replace_adapter(self, lora: Any, earlier: Any) -> None:
        """Handle an adapter that has the same number as `earlier`, an earlier adapter."""
        reason = f"adapter {earlier.lora_name!r} of another path has the same lora_int_id {lora.lora_int_id}"
        self._uncertain[earlier.lora_name, earlier.lora_path] = f"it was replaced by {lora.lora_path}"
        if lora.load_inplace and not earlier.load_inplace:
            self._numbers[lora.lora_int_id] = lora
        else:  # either adapter may be loaded while requests of the other one run
            self._uncertain[lora.lora_name, lora.lora_path] = reason

    def _read(self, key: tuple[str, str]) -> None:
        """Read the files under this name and path, for the first time or again."""
        try:
            path = local_checkpoint(key[1])
            states = file_states(path) if path is not None else {}
            if not any(name.endswith(WEIGHT_SUFFIXES) for name in states):
                self._uncertain[key] = "its files are not on this machine; give vLLM a local path"
            elif key not in self._contents:
                digests = json.dumps(DigestReader().digests_of(states))
                self._contents[key] = _Content(states, hashlib.sha256(digests.encode()).hexdigest())
            elif self._contents[key].states != states:
                self._uncertain[key] = "its files have changed; load what is new from another path"
        except OSError as error:
            self._uncertain[key] = f"its files cannot be read: {error}"

    def record_load(self, lora: Any) -> None:
        """Record an adapter that vLLM is about to load, or has loaded."""
        with suppress(InvalidRequest):  # an error is logged with the adapter's first request
            self.content(lora)


_watchers: WeakSet[LoraAdapters] = WeakSet()


def _watch_loads(adapters: LoraAdapters) -> None:
    """Have `adapters` read the files of an adapter when vLLM loads it, because they may have changed when the adapter's
    first request arrives. vLLM has no hook for connectors when it loads an adapter."""
    from vllm.v1.engine.core import EngineCore

    _watchers.add(adapters)
    load = EngineCore.add_lora
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def watched(self: Any, lora_request: Any) -> bool:
        for watcher in _watchers:
            watcher.record_load(lora_request)
        try:
            return load(self, lora_request)
        finally:
            for watcher in _watchers:
                watcher.record_load(lora_request)

    EngineCore.add_lora = watched
