"""The reference of vLLM's API beside kvferry's: endpoints, fields of requests, and flags of `vllm serve`.

vLLM's are in `vllm_api.json`, which `scripts/vllm_api.py` writes; kvferry's are read from its code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import kvferry.engine.server
from docs_site import commands
from docs_site.tables import code, table
from kvferry.api.dialects.translator import TRANSLATED_PATHS
from kvferry.api.other_fields import REFUSED, WITHOUT_EFFECT
from kvferry.api.requests import ChatCompletionRequest, CompletionRequest
from kvferry.core.errors import KvferryError
from kvferry.engine.server.routes.other_paths import explain_path
from kvferry.router.paths import PublicPaths

DATA = Path(__file__).with_name("vllm_api.json")
_ROUTE = re.compile(r'Route\("([A-Z]+)", "([^"]+)"')
_REFUSED_HERE = frozenset({"chat_template", "use_beam_search"})
"""Fields that kvferry's requests have in order to refuse them with a reason of their own."""
HEAD = """# vLLM's API

What kvferry has of the API of vLLM {version}: its server's endpoints, the fields of its requests, and its flags. Behind
kvferry's router, vLLM's own servers get all fields unchanged, and every flag after `--`.
"""


def page() -> str:
    """The page as Markdown."""
    vllm: dict[str, Any] = json.loads(DATA.read_text())
    parts = [
        HEAD.format(version=vllm["version"]),
        "## Endpoints\n",
        "*Translated*: a request becomes a chat, which goes over both legs. The router passes on further paths with"
        " `--forward-path`.\n",
        table(("endpoint", "kvferry's engine", "kvferry's router"), endpoint_rows(vllm["endpoints"])),
    ]
    for title, key, body in (
        ("chat", "chat_fields", ChatCompletionRequest),
        ("completion", "completion_fields", CompletionRequest),
    ):
        parts += [f"## Fields of a {title}\n", table(("kvferry's engine", "fields"), field_rows(vllm[key], body))]
    parts += ["## Flags\n", flags_text(vllm["flags"])]
    return "\n".join(parts)


def endpoint_rows(endpoints: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """A row for each endpoint: its name, what kvferry's engine answers, and what its router does."""
    served = engine_endpoints()
    for endpoint in endpoints:
        path, method = endpoint.split()
        public = re.sub(r"\{\w+\}", "x", path)
        yield code(endpoint), _of_engine(method, public, served), _of_router(method, public)


def engine_endpoints() -> frozenset[tuple[str, str]]:
    """Methods and paths of kvferry's engine."""
    folder = Path(kvferry.engine.server.__file__).parent
    found = {match for path in folder.rglob("*.py") for match in _ROUTE.findall(path.read_text())}
    return frozenset(found | {("POST", path) for path in TRANSLATED_PATHS} | {("GET", "/openapi.json")})


def _of_engine(method: str, path: str, served: frozenset[tuple[str, str]]) -> str:
    if (method, path) in served:
        return "translated" if path in TRANSLATED_PATHS else "yes"
    if path.startswith("/v1/responses/x"):
        return "of the stored ones" if method == "GET" else "refused by name"
    explained = explain_path(path)
    return "404" if explained is None else f"404: {explained.partition(': ')[2]}"


def _of_router(method: str, path: str) -> str:
    if path in TRANSLATED_PATHS:
        return "translated"
    if path.startswith("/v1/responses/x"):
        return "of the stored ones" if method == "GET" else "refused by name"
    if path in ("/health", "/metrics"):
        return "its own"
    try:
        PublicPaths().find(method, path)
    except KvferryError:
        return "no"
    return "passed on"


def field_rows(names: Sequence[str], body: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """The fields by what the engine does with them."""
    taken = [name for name in names if name in body.__struct_fields__ and name not in _REFUSED_HERE]
    ignored = [name for name in names if name not in taken and name in WITHOUT_EFFECT]
    refused = [name for name in names if name not in taken and name not in ignored]
    yield f"taken ({len(taken)})", _listed(taken)
    yield f"without effect, named in a header ({len(ignored)})", _listed(ignored)
    yield f"refused by name, unless it asks for nothing ({len(refused)})", _listed(refused)
    assert set(refused) <= set(REFUSED) | _REFUSED_HERE, "a field is not decided on"


def flags_text(flags: Sequence[str]) -> str:
    """The flags that `kvferry serve` has under the same name, and the others."""
    own = {name for flag in commands.flags(commands.commands()["serve"]) for name in flag.names}
    same = [flag for flag in flags if flag in own]
    others = [flag for flag in flags if flag not in own]
    return (
        f"`kvferry serve` has {len(same)} of the {len(flags)} flags of `vllm serve` under the same name:"
        f" {_listed(same)}.\n"
        f"\nIt does not have these: {_listed(others)}.\n"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(code, names))
