"""Names of the models that ship inside the package, and the resolution of model names to directories or hub ids.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from kvferry.core.errors import ConfigError, UnknownName

BUILTIN: dict[str, str] = {"kvferry/tiny-python": "tiny_python"}
"""Built-in model names, each with the directory beside this file that holds it."""

_BUILTIN_PREFIX = "kvferry/"
"""Names with this prefix are never looked up on the hub."""

_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_MAX_CHARACTERS = 96
_NEAR = 0.85


def resolve(model: str) -> Path | str:
    """The directory of a built-in or local model, or else, unchanged, the id of a model on the Hugging Face hub.

    Raises `ConfigError` for anything else, with the nearest existing name: a built-in name that is mistyped, a path to
    nothing, a directory without a model.
    """
    if model in BUILTIN:
        return _builtin_directory(model)
    directory = _directory(model)
    if directory is not None:
        return _model_directory(directory)
    if model.startswith(_BUILTIN_PREFIX) or get_close_matches(model, _names(), n=1, cutoff=_NEAR):
        raise UnknownName("built-in model", model, BUILTIN)
    if _is_path(model) and model.isprintable():
        _refuse_file(model)
        raise ConfigError(f"there is no directory {model!r}{_nearest(Path(model))}")
    if len(model) > _MAX_CHARACTERS or ".." in model or "--" in model or not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"{model[:200]!r} names no model: give a directory with config.json, tokenizer and safetensors, the id of a"
            f" model on the Hugging Face hub (organisation/name), or {next(iter(BUILTIN))}"
        )
    return model


def _directory(model: str) -> Path | None:
    """The directory of that name, if there is one."""
    try:
        path = Path(model).expanduser()
        return path if model and path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long, with a null byte, or ~ with an unknown user
        return None


def _refuse_file(model: str) -> None:
    """Raise `ConfigError` if it is a file, such as one of the weights."""
    try:
        is_file = Path(model).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return
    if is_file:
        raise ConfigError(f"{model!r} is a file; give the directory that has config.json, tokenizer and safetensors")


def _names() -> list[str]:
    """Built-in names, with and without their prefix."""
    return [*BUILTIN, *(name.removeprefix(_BUILTIN_PREFIX) for name in BUILTIN)]


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1


def _model_directory(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{str(directory)!r} is a directory without config.json: it holds no model of transformers")
    return directory


def _nearest(directory: Path) -> str:
    """A hint that names a sibling directory with a similar name; empty if there is none."""
    try:
        names = [entry.name for entry in directory.parent.iterdir() if entry.is_dir()]
    except (OSError, ValueError):
        return ""
    near = get_close_matches(directory.name, names, n=1, cutoff=0.6)
    return f"; did you mean {str(directory.with_name(near[0]))!r}?" if near else ""


def _builtin_directory(model: str) -> Path:
    """The directory of a built-in model, which must be a real one: loaders map its files."""
    directory = Path(str(resources.files("kvferry.models"))) / BUILTIN[model]
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{model} is built in, but {directory} holds no config.json; install kvferry again")
    return directory
