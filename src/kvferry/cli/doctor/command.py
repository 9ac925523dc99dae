"""`kvferry doctor`: findings about this machine, a running deployment or a spec, each with the line that mends it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvferry.cli.client.stream import OpenAIClient
from kvferry.cli.doctor.bundle import write_bundle
from kvferry.cli.doctor.deployment import examine_deployment
from kvferry.cli.doctor.finding import MARKS, Finding, good, problem
from kvferry.cli.doctor.machine import examine_machine
from kvferry.cli.fleet.controllers import make_backend
from kvferry.cli.router_address import reachable_url
from kvferry.cli.running import running_commands
from kvferry.cli.text import shortened
from kvferry.cli.watch.servers import Servers
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.host.machine import num_cpus
from kvferry.core.runtime.threads import run_async
from kvferry.fleet.places import ledger_of, running_path
from kvferry.fleet.spec.fleet_spec import read_fleet
from kvferry.models.catalog import resolve

_WIDTH = 78


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
    """Say what is wrong, and the line that mends it.

        kvferry doctor http://127.0.0.1:8000

    For a router, it also measures what hand-offs carry, beside what their medium carries. Exit code 1: there is a
    problem.
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
    """A finding in lines of at most 80 columns, as far as words allow."""
    lines = [""]
    for word in f"{MARKS[finding.verdict]} {finding.text}".split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append(f"  {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return [*lines, *([f"    → {finding.remedy}"] if finding.remedy else [])]
