"""The references of the documentation site have everything that the code has."""

from __future__ import annotations

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from docs_site import api, commands, connectors, environment, llms, metrics, repository, spec, vllm_api
from kvferry.connectors.registry import BUILTIN, find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.names import resolve
from kvferry.core.settings.environment import VARIABLES
from kvferry.core.settings.model import settings_fields
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.router.config import RouterConfig

ROOT = Path(__file__).parents[2]
INTERNAL = {"KVFERRY_HELPER_NAME", "KVFERRY_HELPER_LOG_FORMAT"}
"""Set by a process for its own helper processes."""
_SOURCES = {".py", ".cpp", ".cu", ".h", ".toml", ".html", ".js"}


COMMANDS = commands.commands()


@pytest.fixture(scope="module")
def reference() -> str:
    """The page of all commands."""
    return commands.page()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_in_the_reference_with_its_meaning(command: str, reference: str) -> None:
    section = reference.partition(f"## kvferry {command}\n")[2].partition("\n## kvferry")[0]
    rows = {row.split("|")[1].strip(): row for row in section.splitlines() if row.startswith("| `")}
    names = {name for flag in commands.flags(COMMANDS[command]) for name in flag.names if not name.startswith("--no-")}
    assert {name for cell in rows for name in re.findall(r"`(.+?)`", cell)} == names
    assert all(len(row.rsplit("|", 2)[1].strip()) > 8 for row in rows.values())


@pytest.mark.parametrize("command", ["router", "serve"])
def test_settings_of_the_router_are_in_groups_in_the_order_of_their_class(command: str) -> None:
    groups = {flag.name: commands._group(flag)[1] for flag in commands.flags(COMMANDS[command])}
    headings = list(dict.fromkeys(group for group in groups.values() if group.startswith("Router")))
    assert headings == [field.heading for field in settings_fields(RouterConfig) if field.heading]
    assert groups["--tenants-file"] == "Router: tenants"
    assert groups["--registration"] == "Router: instances"
    assert groups["--host"] == "Listening"


def test_every_environment_variable_is_a_flags_or_explained() -> None:
    flags = {commands.variable(flag) for command in COMMANDS.values() for flag in commands.flags(command)}
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"KVFERRY_[A-Z0-9_]*[A-Z0-9]", node.value)
    }
    assert named - flags - INTERNAL - {"KVFERRY_CONFIG"} == set(VARIABLES)
    page = environment.page()
    assert all(f"`{name}`" in page for name in VARIABLES)


def spec_keys() -> list[tuple[str, str]]:
    """Every key of a spec, with its table."""
    own = {name: list(keys.fields()) for name, keys in spec.SETTINGS.items()}
    tables = {name: list(kind.__struct_encode_fields__) for name, kind in spec.tables().items()}
    sections = {"role", "engine", "router", "unit", "roll", "failure", "backend", "scale", "keys"}
    tables[""] = [key for key in tables[""] if key not in sections]
    return [(name, key) for group in (tables, own) for name, keys in group.items() for key in keys]


@pytest.fixture(scope="module")
def spec_page() -> str:
    return spec.page()


@pytest.mark.parametrize(("name", "key"), spec_keys())
def test_every_key_of_a_spec_is_in_the_reference_with_its_meaning(name: str, key: str, spec_page: str) -> None:
    heading = f"## [{name}]" if name else "## Outside of any table"
    section = spec_page.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith(f"| `{key}` |")]
    assert len(rows) == 1
    assert len(rows[0].rsplit("|", 2)[1].strip()) > 8


@pytest.mark.parametrize("name", BUILTIN)
def test_every_option_of_every_connector_is_in_the_reference_with_its_meaning(name: str) -> None:
    page = connectors.page()
    assert name in page
    for key in resolve(BUILTIN[name].options).__struct_encode_fields__:
        [row, *_] = [line for line in page.splitlines() if line.startswith(f"| `{key}` |")]
        assert len(row.rsplit("|", 2)[1].strip()) > 8


def test_an_option_of_the_wrong_type_is_refused_before_anything_is_started() -> None:
    config = KVTransferConfig(kv_connector="NixlConnector", kv_connector_extra_config={"backends": "UCX"})
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.backends"):
        find_connector(config).check(config)


def test_metrics_of_engine_and_router_are_in_the_reference() -> None:
    page = metrics.page()
    for name in (
        "vllm:time_to_first_token_seconds",
        "kvferry:kv_load_failures_total",
        "kvferry_router_requests_total",
        "kvferry_router_instance_scraped",
    ):
        assert f"| `{name}` |" in page
    assert "_created" not in page


def test_every_module_of_the_reference_is_there() -> None:
    assert all(find_spec(module) for _, _, modules in api.PAGES.values() for module in modules)


def test_every_name_in_the_description_of_the_architecture_is_in_the_code() -> None:
    """A rename that forgets the page would leave a reader searching."""
    sources = [path for folder in ("src", "hunts") for path in (ROOT / folder).rglob("*.*") if path.suffix in _SOURCES]
    code = "\n".join(path.read_text() for path in sources)
    names = {*re.findall(r"\w+", code), *(part for path in sources for part in path.relative_to(ROOT).parts)}
    names |= {path.stem for path in sources} | {"test_borders"}
    page = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\([\w, ]*\))?`", page))
    assert len(named) > 200
    assert sorted(name for name in named if not names.issuperset(name.split("."))) == []
    functions = set(re.findall(r"`(?:\w+\.)*(\w+)\([\w, ]*\)`", page))
    assert functions <= set(re.findall(r"(?:def|class) (\w+)", code))


@pytest.mark.parametrize(
    ("place", "link", "expected"),
    [
        ("index.md", "docs/vllm.md#windows", "vllm.md#windows"),
        ("index.md", "benchmarks/README.md", "benchmarks.md"),
        ("index.md", "benchmarks/", "benchmarks.md"),
        ("vllm.md", "../README.md#serve", "index.md#serve"),
        ("extending.md", "../examples/unix_socket_pipe.py", "examples/unix_socket_pipe.py"),
        ("benchmarks.md", "results/ttft.intel-xeon-amx.png", "benchmarks/results/ttft.intel-xeon-amx.png"),
        ("benchmarks.md", "../docs/architecture.md", "architecture.md"),
        ("vllm.md", "https://example.com/README.md", "https://example.com/README.md"),
        ("vllm.md", "../nowhere.md", "../nowhere.md"),
        ("reference/environment.md", "commands.md", "commands.md"),
    ],
)
def test_links_lead_to_the_same_page_in_the_site(place: str, link: str, expected: str) -> None:
    assert repository.with_links(f"see [it]({link})", place) == f"see [it]({expected})"


def test_links_in_code_are_left_alone() -> None:
    text = "```\n[it](docs/vllm.md)\n```\n"
    assert repository.with_links(text, "index.md") == text


def test_llms_txt_names_every_page_with_its_first_sentence() -> None:
    lines = re.sub(r"^extra:.*", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE | re.DOTALL)
    config = yaml.safe_load(lines)
    places = llms.places(config["nav"])
    beside = {place: path.read_text() for place, path in repository.PAGES.items()}
    pages = beside | {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    assert pages.keys() <= set(places)
    assert len(places) == len(set(places))
    text = llms.text(config["site_name"], config["site_description"], config["nav"], pages)
    assert text.startswith("# kvferry\n\n> Serve large language models")
    for place in pages:
        [summary] = re.findall(rf"^- \[[^\]]+\]\({re.escape(place)}\): (.+)$", text, re.MULTILINE)
        assert 20 < len(summary) < 400
        assert not re.search(r"[`*]|\]\(", summary)


def test_all_of_vllms_api_is_in_its_page() -> None:
    page, vllm = vllm_api.page(), json.loads(vllm_api.DATA.read_text())
    assert [f"`{endpoint}`" for endpoint in vllm["endpoints"] if f"| `{endpoint}` |" not in page] == []
    names = [name for key in ("chat_fields", "completion_fields", "flags") for name in vllm[key]]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("endpoint", "engine", "router"),
    [
        ("/v1/chat/completions POST", "yes", "passed on"),
        ("/v1/messages POST", "translated", "translated"),
        ("/v1/responses/{response_id} GET", "of the stored ones", "of the stored ones"),
        ("/pooling POST", "404: vLLM behind the router has it, with a pooling model", "passed on"),
        ("/sleep POST", "404", "no"),
        ("/ping GET", "yes", "passed on"),
        ("/health GET", "yes", "its own"),
    ],
)
def test_each_endpoint_of_vllms_has_its_row(endpoint: str, engine: str, router: str) -> None:
    assert list(vllm_api.endpoint_rows([endpoint])) == [(f"`{endpoint}`", engine, router)]
