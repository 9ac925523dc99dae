"""The command line: help that teaches, errors in one line, flags from arguments, environment and file."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cli.torch_blocked import TorchBlocked
from docs_site.commands import commands
from kvferry import __version__
from kvferry.cli.flag_sources import ConfigFile
from kvferry.cli.flags import complete
from kvferry.cli.main import COMMANDS, ENVIRONMENT, HELP, app, for_engine, main
from kvferry.core.settings.flags import flag_name
from kvferry.core.settings.model import field_help
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.ready import start_messages
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.fleet.spec.variables import flag_variables
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig

COMMON = [ListenSettings, LogConfig, HttpAccess, HttpLimits]
CONFIGS = [EngineConfig, EngineChoice, InstanceSettings, FleetShapeSettings, RouterConfig, RestartPolicy, *COMMON]


@pytest.fixture(autouse=True)
def _no_flags_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in flag_variables():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(app, "config", ())  # where flags come from is set by each command line


def said(*arguments: str, config: Path | None = None) -> dict[str, Any]:
    """The flags of a command as it would get them."""
    app.config = (ENVIRONMENT,) if config is None else (ENVIRONMENT, ConfigFile(config, COMMANDS))
    _, bound, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return dict(bound.arguments)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a wrong command line: one line."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvferry: error: ")
    assert err.count("\n") == 1
    return err.strip()


# Help.


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS), ["--version"]])
def test_help_needs_neither_a_model_nor_a_server(arguments: list[str], blocked: TorchBlocked) -> None:
    done = blocked.run(*arguments)
    assert done.returncode == 0, done.stderr
    assert (__version__ if arguments == ["--version"] else "Usage: kvferry") in done.stdout


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "kvferry serve kvferry/tiny-python --prefill 1 --decode 1" in text
    every = (*COMMANDS, "cache", "fleet", "simulate", "calibrate", "plan", "why")
    assert all(re.search(rf"^│ {command} +[A-Z]", text, re.MULTILINE) for command in every)


@pytest.mark.parametrize(
    ("command", "configs", "absent"),
    [
        ("serve", CONFIGS, {"prefill_url", "decode_url", "bootstrap_port"}),
        ("prefill", [EngineConfig, EngineChoice, InstanceSettings, *COMMON], set()),
        ("decode", [EngineConfig, EngineChoice, InstanceSettings, *COMMON], set()),
        ("router", [RouterConfig, ListenSettings, LogConfig], set()),
    ],
)
def test_every_setting_is_a_flag_with_its_help(
    command: str,
    configs: list[type],
    absent: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # where the longest name of a flag fits in one line also
    assert main([command, "--help-all"]) == 0
    text = capsys.readouterr().out
    flat = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    for config in configs:
        helps = field_help(config)
        assert set(helps) == set(config.__struct_fields__)
        for name, help_text in helps.items():
            assert (flag_name(name) in text) == (name not in absent)
            assert name in absent or " ".join(help_text.split()[:3]) in flat
    assert "--ready-fd" not in text


@pytest.mark.parametrize("command", ["serve", "prefill", "decode", "router", "picker", "calibrate", "cache warm"])
def test_help_shows_the_flags_that_most_users_set_and_names_the_page_with_all(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {}
    for page in ("--help", "--help-all"):
        assert main([*command.split(), page]) == 0
        pages[page] = capsys.readouterr().out
    short, full = (set(re.findall(r"^│ (?:[* ]  )?(?:[A-Z]+ )?(--[a-z-]+)", page, re.M)) for page in pages.values())
    assert short < full
    assert re.fullmatch(rf"\d+ more flags: kvferry {command} --help-all", pages["--help"].splitlines()[-1])
    assert "--help-all" not in pages["--help-all"]
    assert len(pages["--help"].splitlines()) < 100


def test_a_command_of_few_flags_has_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Its `--admin-key` is its own, and not the servers' setting of the same name, which few set."""
    for page in ("--help", "--help-all"):
        assert main(["fleet", "list", page]) == 0
        text = capsys.readouterr().out
        assert "--admin-key" in text
        assert "more flags" not in text


@pytest.mark.parametrize("command", ["", *commands()])
def test_examples_in_help_can_be_pasted(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 80 columns each line of an example is a line of the terminal, and nothing follows a backslash."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    printed = {line.removeprefix(" ") for line in capsys.readouterr().out.splitlines()}
    text = HELP if not command else inspect.getdoc(commands()[command].default_command) or ""
    assert {line[4:] for line in text.splitlines() if line.startswith("    ")} <= printed


def test_python_dash_m_works() -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == __version__


# Errors.


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serv", "m"], 'Did you mean "serve"?'),
        (["xyz"], ", ...; see kvferry --help"),
        (["serve"], "--model requires an argument; see kvferry serve --help"),
        (["serve", "m", "more"], "unexpected argument 'more'; see kvferry serve --help"),
        (["cache", "stat", "/x", "more"], "unexpected argument 'more'; see kvferry cache stat --help"),
        (["serve", "m", "--max-num-sequences", "3"], "Did you mean --max-num-seqs? See kvferry serve --help"),
        (["serve", "m", "--max-num-seqs", "many"], '--max-num-seqs: unable to convert "many" into int'),
        (["serve", "m", "--dtype", "float8"], '"float8" for --dtype. Choose from: "auto", "float32"'),
        (["serve", "m", "--prefill", "-1"], "--prefill must not be negative, got -1"),
        (["serve", "m", "--port", "70000"], "--port must be between 0 and 65535"),
        (["serve", "m", "--prefill", "1", "--cores", "x"], "--cores: 'x' is not a core or a range"),
        (["decode", "m", "--block-size", "0"], "--block-size must be at least 1, got 0"),
        (["decode", "m", "--ranks-at", "10.0.0.1:7000"], "--ranks-at needs --tensor-parallel-size of at least 2"),
        (
            ["decode", "m", "--tp=2", "--ranks-at", "7000"],
            "--ranks-at must be HOST:PORT, such as 10.0.0.1:7000, got '7000'",
        ),
        (["rank", "10.0.0.1:7000"], "kvferry rank needs KVFERRY_AUTH_TOKEN"),
        (["prefill", "m", "--kv-transfer-config", "{"], "--kv-transfer-config is not valid JSON"),
        (
            ["serve", "m", "--kv-transfer-config", "NixlConnector"],
            """write it as '{"kv_connector": "NixlConnector"}'""",
        ),
        (["serve", "m", "--kv-transfer-config", "{kv_connector:X}"], "got {kv_connector:X}"),
        (["serve", "m", "--kv-transfer-config", '{"kv_conector": "x"}'], "did you mean 'kv_connector'?"),
        (["decode", "m", "--kv-transfer-config", '{"kv_connector": "P2Connector"}'], "did you mean 'P2pConnector'?"),
        (["router"], "--decode-url http://host:port"),
        (["router", "--decode-url", "ftp://x"], "'ftp://x' is not an instance's URL"),
        (["router", "--decode-url", "d:1", "--max-body", "big"], "--max-body: 'big' is not a size"),
        (["serve", "m", "--", "--dtype", "float32"], "the arguments after -- are for vLLM and SGLang; add"),
        (["serve", "m", "--engine", "vlm"], '"vlm" for --engine. Choose from: "kvferry", "vllm", "sglang"'),
        (["serve", "m", "--engine", "vllm", "--engine-python", "/nowhere"], "--engine-python /nowhere is not a file"),
        (["decode", "m", "--engine", "vllm", "--block-size", "16"], "as in: -- --block-size 16"),
        (["prefill", "m", "--engine", "vllm", "--", "--port", "1"], "--port after -- is set by kvferry"),
        (["router", "--decode-url", "d:1", "--bootstrap-port", "1"], "--bootstrap-port is given 1 times for 0"),
        (["serve", "m", "--config", "nowhere.toml"], "--config nowhere.toml: No such file or directory"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in complaint(capsys, *arguments)


# Where flags come from.


def test_defaults_are_those_of_the_settings() -> None:
    flags = said("serve", "m")
    assert complete(EngineConfig, flags["engine"], model=flags["model"]) == EngineConfig(model="m")
    assert complete(RouterConfig, flags["router"]) == RouterConfig()
    assert complete(FleetShapeSettings, flags["fleet"]) == FleetShapeSettings()
    assert complete(InstanceSettings, flags["instance"]) == InstanceSettings()
    assert complete(ListenSettings, flags["listen"]) == ListenSettings()


def test_what_stands_behind_two_dashes_reaches_vllm_word_by_word() -> None:
    words = ["--dtype", "float32", "--hf-overrides", '{"a": 1}', "-O3", "--", "x y"]
    passed_on = for_engine(["serve", "m", "--engine", "vllm", "--", *words])
    assert said(*passed_on)["choice"].engine_argument == tuple(words)
    assert for_engine(["serve", "m"]) == ["serve", "m"]


FILE = """
[engine]
model = "from-file"
engine = "vllm"
engine_argument = ["--dtype", "float32"]
max_num_seqs = 7
prefix-caching = false
served_model_name = ["one", "two"]

[router]
hand_off = "sequential"
retries = 3
prefill_url = ["http://p:1"]
decode_url = ["http://d:1"]

[serve]
prefill = 2
port = 0
max_num_batched_tokens = 555

[serve.kv_transfer_config]
kv_connector = "SharedStorageConnector"
kv_connector_extra_config = { shared_storage_path = "/tmp/kv" }

[decode]
port = 8002
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    return path


def test_a_file_gives_flags_to_the_commands_that_have_them(config: Path) -> None:
    flags = said("serve", config=config)
    assert flags["model"] == "from-file"
    assert (flags["engine"].max_num_seqs, flags["engine"].prefix_caching) == (7, False)
    assert (flags["choice"].engine, flags["choice"].engine_argument) == ("vllm", ("--dtype", "float32"))
    assert flags["engine"].max_num_batched_tokens == 555
    assert flags["instance"].served_model_name == ("one", "two")
    assert (flags["router"].hand_off, flags["router"].retries) == ("sequential", 3)
    assert (flags["fleet"].prefill, flags["fleet"].decode) == (2, None)
    assert json.loads(flags["instance"].kv_transfer_config) == {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": "/tmp/kv"},
    }
    decode = said("decode", config=config)
    assert (decode["model"], decode["listen"].port, decode["engine"].max_num_seqs) == ("from-file", 8002, 7)
    router = said("router", config=config)
    assert (router["router"].prefill_url, router["listen"].port) == (("http://p:1",), 8000)


def test_the_command_line_wins_then_the_environment_then_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("KVFERRY_RETRIES", "9")
    monkeypatch.setenv("KVFERRY_PREFIX_CACHING", "true")
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "not a flag")
    monkeypatch.setenv("KVFERRY_PREFILL_URL", "http://not-for-serve:1")
    flags = said("serve", "mine", "--retries", "1", config=config)
    assert flags["model"] == "mine"
    assert (flags["engine"].max_num_seqs, flags["engine"].prefix_caching) == (8, True)
    assert flags["router"].retries == 1
    assert flags["fleet"].prefill == 2


def test_the_environment_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVFERRY_MODEL", "m")
    monkeypatch.setenv("KVFERRY_DECODE_URL", "http://a:1 http://b:1")
    assert said("serve")["model"] == "m"
    assert said("router")["router"].decode_url == ("http://a:1", "http://b:1")
    monkeypatch.delenv("KVFERRY_DECODE_URL")
    monkeypatch.setenv("KVFERRY_PORT", "many")
    assert "KVFERRY_PORT" in complaint(capsys, "serve")


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = ("KVFERRY_MAX_NUM_SEQS=8", "KVFERRY_WAIT_S=1", "KVFERRY_CACHE_DIR=/tmp", "KVFERRY_XYZZY=1")
    of_kubernetes = ("KVFERRY_ROUTER_SERVICE_HOST=10.0.0.1", "KVFERRY_ROUTER_PORT=tcp://10.0.0.1:8000")
    wrong = {"KVFERRY_ADMINKEY": "KVFERRY_ADMIN_KEY", "KVFERRY_AUTHTOKEN": "KVFERRY_AUTH_TOKEN"}
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)
    for variable in (*right, *of_kubernetes, *(f"{name}=x" for name in wrong)):
        monkeypatch.setenv(*variable.split("="))
    assert main(["cache", "ls", "/nowhere"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    told = "kvferry: warning: nothing reads the variable {}; did you mean {}?"
    assert lines == [told.format(name, near) for name, near in sorted(wrong.items())]
    monkeypatch.setenv("KVFERRY_INSTANCE_NAME", "prefill-0")
    assert main(["cache", "ls", "/nowhere"]) == 2
    assert "warning" not in capsys.readouterr().err


def test_the_file_may_be_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_CONFIG", str(tmp_path / "nowhere.toml"))
    assert "nowhere.toml" in complaint(capsys, "serve", "m")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[engine]\nmax_num_seq = 1", "[engine]: 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("[engine]\nport = 1", "[engine]: 'port'"),
        ("[router]\nhandoff = 'auto'", "[router]: 'handoff'; did you mean 'hand_off'?"),
        ("[serve]\nprefil = 1", "[serve]: 'prefil'; did you mean 'prefill'?"),
        ("[engin]\n", "'engin'; did you mean 'engine'?"),
        ("port = 1", "unknown table"),
        ("engine = 1", "is outside of any table"),
        ("[engine]\nblock_size = 'x'", '[engine]: unable to convert "x" into int'),
        ("[engine", "is not valid TOML"),
        ("[engine]\nblock_size = 0", "--block-size must be at least 1"),
    ],
)
def test_errors_in_a_file_name_the_place(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    error = complaint(capsys, "serve", "m", "--config", str(path))
    assert told in error
    assert "wrong.toml" in error or "--block-size" in error


# Commands that run.


def test_the_router_as_a_child_of_a_supervisor() -> None:
    read, write = os.pipe()
    command = [sys.executable, "-m", "kvferry.cli.main", "router", "--decode-url=http://127.0.0.1:9", "--port=0"]
    with subprocess.Popen([*command, "--ready-fd", str(write)], pass_fds=(write,)) as process:
        os.close(write)
        url = next(start_messages().feed(os.read(read, 4096))).url
        os.close(read)
        with urllib.request.urlopen(url + "/kvferry/instances", timeout=10) as response:
            assert json.load(response)["instances"][0]["role"] == "decode"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_an_address_in_use_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from kvferry.http.server.listen import listen

    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in complaint(
            capsys, "router", "--decode-url", "d:1", "--port", str(port)
        )
