"""Where a model's name leads, and what is said of one that leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.models.catalog import BUILTIN, resolve
from kvferry.models.hub import require_on_hub


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_built_in_names_lead_to_directories() -> None:
    for name in BUILTIN:
        assert (Path(resolve(name)) / "config.json").is_file()


def test_directories_and_ids(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(model)) == model
    monkeypatch.chdir(model.parent)
    assert resolve("my-model") == Path("my-model")
    monkeypatch.setenv("HOME", str(model.parent))
    assert resolve("~/my-model") == model
    for name in ("gpt2", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B", "a_b/c.d"):
        assert resolve(name) == name


@pytest.mark.parametrize(
    "name", ["kvferry/tiny-pyton", "kvferry/tiny-py\nthn", "kvfery/tiny-python", "tiny-python", "kvferry/other"]
)
def test_what_is_almost_built_in_is_never_a_hub_id(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown built-in model .*kvferry/tiny-python"):
        resolve(name)


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "-x", "x" * 97, "x" * 5000, "é/b", "a\0b", "/a\nb", "a--b", "~nobody-of-that-name", "a..b/c"],
)
def test_what_can_be_no_model_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match=r"names no model|there is no directory"):
        resolve(name)


def test_a_path_to_nothing_names_the_nearest(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no directory .*my-modle'; did you mean .*my-model'"):
        resolve(str(model.parent / "my-modle"))
    with pytest.raises(ConfigError, match="there is no directory"):
        resolve("./nowhere/at/all")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without config\.json"):
        resolve(str(tmp_path))


def test_offline_the_hub_is_not_asked() -> None:
    program = (
        "import socket, sys\n"
        "def refuse(*arguments): raise AssertionError('asked the network')\n"
        "socket.getaddrinfo = refuse\n"
        "from kvferry.models.hub import require_on_hub\n"
        "from kvferry.core.errors import ConfigError\n"
        "try: require_on_hub('some/model')\n"
        "except ConfigError as error: print(error)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nowhere", "PYTHONPATH": ":".join(sys.path), "HOME": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60, env=environment
    )
    assert "'some/model' (there is no directory of that name) is not in the cache" in done.stdout, done.stderr


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="cannot be reached"):
        require_on_hub("some-organisation/no-such-model")
