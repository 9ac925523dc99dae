"""`kvferry doctor`: findings about this machine, a running deployment or a spec, each with a command that solves the
problem; and the bundle, a file for an issue with findings, versions, settings and the ends of logs, without secrets."""

from __future__ import annotations

import io
import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvferry import __version__
from kvferry.cli.client.stream import OpenAIClient
from kvferry.cli.doctor.deployment import examine_deployment
from kvferry.cli.doctor.finding import MARKS, Finding, good, problem
from kvferry.cli.doctor.machine import examine_machine
from kvferry.cli.fleet.controllers import make_backend
from kvferry.cli.router_address import reachable_url
from kvferry.cli.running import running_commands
from kvferry.cli.text import shortened
from kvferry.cli.watch.servers import Servers
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.folders.state_folder import state_folder
from kvferry.core.host.machine import num_cpus
from kvferry.core.keys import shared_token, users_token
from kvferry.core.runtime.threads import run_async
from kvferry.fleet.places import ledger_of, running_path
from kvferry.fleet.spec.fleet_spec import read_fleet
from kvferry.models.catalog import resolve

_WIDTH = 78

_SECRET_NAMES = re.compile(r"key|token|secret|password|credential|authorization", re.IGNORECASE)
_VARIABLE_PREFIXES = ("KVFERRY_", "UCX_", "NCCL_", "CUDA_", "OMP_", "VLLM_", "HF_", "RAY_")
_ASSIGNED = re.compile(
    r"(?i)((?:api|admin|auth|instance)[-_a-z]*(?:key|token)|password|secret|kv_seal|authorization|bearer)"
    r"(\"?\s*[:= ]\s*\"?)(?:bearer\s+)?[^\s\",;]+"
)
_IN_URL = re.compile(r"(\w+://)[^/@\s]+@")
_MIN_SECRET = 6
_REMOVED = "(removed)"


def doctor(
    target: Annotated[
        str | None,
        Parameter(help="URL of a router, or a fleet's file. Default: this machine, and what of yours serves on it."),
    ] = None,
    *,
    send: Annotated[bool, Parameter(help="Send a few requests of a long prompt, to measure hand-offs.")] = True,
    json: Annotated[bool, Parameter(help="Print JSON.", negative=())] = False,
    bundle: Annotated[
        Path | None, Parameter(help="Also write findings, versions, settings and logs to this ZIP file, without keys.")
    ] = None,
    api_key: Annotated[str | None, Parameter(help="API key of the server, if it has one.")] = None,
    admin_key: Annotated[str | None, Parameter(help="Admin key of the router, if it has one.")] = None,
    tls_ca: Annotated[Path | None, Parameter(help="Certificate authorities (PEM) of a server at https://.")] = None,
) -> int:
    """Print problems, each with a command that solves it.

        kvferry doctor http://127.0.0.1:8000

    For a router, it also measures the rate of hand-offs, and compares it with the rate of their medium. Exit code 1:
    there is a problem.
    """
    findings: list[Finding] = []

    def show(finding: Finding) -> None:
        findings.append(finding)
        if not json:
            sys.stdout.write("\n".join(lines_of(finding)) + "\n")
            sys.stdout.flush()

    for finding in examine_machine():
        show(finding)
    urls, is_url = [], target is not None and "://" in target
    if target is None:
        urls = [reachable_url(record.url) for record in running_commands() if record.command in ("serve", "router")]
    elif is_url:
        urls = [target]
    else:
        for finding in examine_spec(Path(target)):
            show(finding)

    async def examine() -> None:
        for url in urls:
            client = OpenAIClient(url, api_key=api_key or admin_key, tls_ca=tls_ca)
            async with Servers(tls_ca, admin_key) as servers, client:
                async for finding in examine_deployment(url, servers, client, sends=send):
                    show(finding)

    run_async(examine())
    problems = sum(finding.verdict == "problem" for finding in findings)
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(findings) + b"\n")
    else:
        sys.stdout.write(f"{problems or 'No'} problem{'' if problems == 1 else 's'}.\n")
    if bundle is not None:
        write_bundle(bundle, findings)
        sys.stderr.write(f"kvferry: {shortened(bundle)} is for an issue: look at it before you send it\n")
    return 1 if problems else 0


def examine_spec(path: Path) -> Iterator[Finding]:
    """Findings about a fleet's file: whether it could be applied here."""
    try:
        fleet = read_fleet(path)
    except ConfigError as error:
        yield problem(str(error), "kvferry fleet init prints a spec with its keys")
        return
    yield good(f"{path}: {fleet.name}, {fleet.num_instances} instances of {fleet.model} ({fleet.backend.kind})")
    try:
        make_backend(running_path(ledger_of(fleet.name)), fleet)
        if fleet.backend.kind == "local":
            resolve(fleet.model)
    except KvferryError as error:
        yield problem(str(error), f"kvferry fleet apply {path} --dry-run")
        return
    yield good("it can be applied here")
    if fleet.backend.kind == "local" and fleet.num_instances > num_cpus():
        text = f"{fleet.num_instances} instances share {num_cpus()} cores, and wait for each other"
        yield problem(text, "lower the counts in [role.prefill] and [role.decode]")


def lines_of(finding: Finding) -> Sequence[str]:
    """A finding in lines of at most 80 characters, unless a word is longer."""
    lines = [""]
    for word in f"{MARKS[finding.verdict]} {finding.text}".split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append(f"  {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return [*lines, *([f"    → {finding.remedy}"] if finding.remedy else [])]


def secrets_of(variables: Mapping[str, str] = os.environ) -> list[str]:
    """The values that must not be in a bundle: of variables whose names look like names of secrets, and this user's
    token."""
    values = {value for name, value in variables.items() if _SECRET_NAMES.search(name) and not name.endswith("_FILE")}
    with suppress(ConfigError):
        values |= {shared_token() or "", users_token() or ""}
    return sorted((value for value in values if len(value) >= _MIN_SECRET), key=len, reverse=True)


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text without these values, and without words in places where keys are written."""
    for secret in secrets:
        text = text.replace(secret, _REMOVED)
    text = _IN_URL.sub(rf"\g<1>{_REMOVED}@", text)
    return _ASSIGNED.sub(rf"\g<1>\g<2>{_REMOVED}", text)


def write_bundle(path: Path, findings: Sequence[Finding], variables: Mapping[str, str] = os.environ) -> None:
    """Write the bundle, a ZIP file that only its user can read. Raises `ConfigError`."""
    secrets = secrets_of(variables)
    contents = {
        "findings.txt": "\n".join(_finding_text(finding) for finding in findings),
        "findings.json": msgspec.json.encode(list(findings)).decode(),
        "versions.txt": _versions(),
        "variables.txt": _variables(variables),
        **_log_ends(),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            archive.writestr(name, without_secrets(text, secrets))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(buffer.getvalue())
    except OSError as error:
        raise ConfigError(f"--bundle {path}: {error.strerror or error}") from error


def _finding_text(finding: Finding) -> str:
    remedy = f"\n    {finding.remedy}" if finding.remedy else ""
    return f"{MARKS[finding.verdict]} {finding.text}{remedy}"


def _versions() -> str:
    packages = sorted({f"{package.metadata['Name']} {package.version}" for package in distributions()}, key=str.lower)
    head = [f"kvferry {__version__}", f"Python {sys.version}", f"{platform.platform()} {platform.machine()}"]
    return "\n".join([*head, "", *packages])


def _variables(variables: Mapping[str, str]) -> str:
    return "\n".join(
        f"{name}={_REMOVED if _SECRET_NAMES.search(name) else value}"
        for name, value in sorted(variables.items())
        if name.startswith(_VARIABLE_PREFIXES)
    )


def _log_ends(max_logs: int = 8) -> dict[str, str]:
    """The ends of the `max_logs` newest logs of commands and of fleets' controllers, and the specs of these."""
    with suppress(OSError, ConfigError):
        folder = state_folder()
        paths = [*(folder / "logs").glob("*.log"), *(folder / "fleets").glob("*/controller.log")]
        newest = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[:max_logs]
        return {f"logs/{path.parent.name}-{path.name}": _end_of_log(path) for path in newest}
    return {}


def _end_of_log(path: Path, max_bytes: int = 256 * 1024) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        return file.read(max_bytes).decode(errors="replace")
    return ""
