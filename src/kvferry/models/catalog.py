"""Names of the models that ship inside the package, and where a given model name leads.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

BUILTIN: dict[str, str] = {"kvferry/tiny-python": "tiny_python"}
"""Built-in model names, each with the directory beside this file that holds it."""


def resolve(model: str) -> Path | str:
    """Find out what ``model`` names.

    Args:
        model: A built-in name, a local directory, or the id of a model on the Hugging Face hub.

    Returns:
        The directory of a built-in or local model as a ``Path``; anything else, which can then only
        be a hub id, unchanged as a ``str``.

    Raises:
        FileNotFoundError: The name is built in, but this installation lacks its files.
    """
    if model in BUILTIN:
        return _builtin_directory(model)
    directory = Path(model).expanduser()
    return directory if directory.is_dir() else model


def _builtin_directory(model: str) -> Path:
    """Return the directory of a built-in model, which must be a real one: loaders map its files."""
    directory = Path(str(resources.files("kvferry.models"))) / BUILTIN[model]
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{model} is built in, but {directory} holds no config.json")
    return directory
