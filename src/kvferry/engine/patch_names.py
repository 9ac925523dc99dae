"""Names of model patches, which are checked before anything is started, without torch.

`--model-patch` names patches of kvferry (`MODEL_PATCHES`), entry points of the group `kvferry.model_patches` in other
packages, or `module:Class`, each with options: `my_patch?min_rows=16`.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qsl

from kvferry.core.errors import ConfigError
from kvferry.core.names import ExtensionPoint

FLAG = "--model-patch"
MODEL_PATCHES = ExtensionPoint(
    FLAG, {"cpu_kernels": "kvferry.engine.model.cpu_kernels:CpuKernels"}, "kvferry.model_patches"
)
DEFAULT_PATCHES = ("cpu_kernels",)


def require_known_patches(names: Sequence[str]) -> None:
    """Raise `ConfigError` for an unknown name or malformed options, as far as they can be checked without imports."""
    for text in names:
        name, _ = split_patch(text)
        MODEL_PATCHES.require_known(name)


def split_patch(text: str) -> tuple[str, dict[str, str]]:
    """A patch's name, and its options as text. Raises `ConfigError`."""
    name, _, query = text.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=64) if query else []
    except ValueError as error:
        raise ConfigError(f"{FLAG} {text!r}: options are written as ?name=value&name=value") from error
    if len(dict(pairs)) < len(pairs):
        raise ConfigError(f"{FLAG} {text!r} has an option twice")
    return name, dict(pairs)
