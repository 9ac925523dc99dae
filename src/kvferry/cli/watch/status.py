"""`kvferry status`: shows what this user runs on this machine, and the checks of all instances."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from kvferry.cli.router_address import reachable_url
from kvferry.cli.running import running_commands
from kvferry.cli.text import duration, printable, shortened
from kvferry.cli.watch.servers import CheckResult, Servers
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.runtime.threads import run_async
from kvferry.fleet.places import fleet_names, ledger_of


@dataclass
class Deployment:
    """A fleet or a serving command. `problem`: the reason why its state cannot be read; empty: it was read."""

    name: str
    url: str = ""
    title: str = ""
    since: float | None = None
    log: str = ""
    problem: str = ""
    results: list[CheckResult] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """True if it answers, and the checks of its instances found no problem."""
        return not self.problem and not any(result.problem for result in self.results)


def status(
    url: Annotated[
        str | None, Parameter(help="URL of one router or instance. Default: everything of this user here.")
    ] = None,
    *,
    json: Annotated[bool, Parameter(help="Print JSON.", negative=())] = False,
    admin_key: Annotated[str | None, Parameter(help="Admin key of the routers, if they have one.")] = None,
    tls_ca: Annotated[Path | None, Parameter(help="Certificate authorities (PEM) of servers at https://.")] = None,
) -> int:
    """Show your fleets and serving commands on this machine, their instances, and the result of each instance's check.

        kvferry status

    A check looks for blocks, leases and transfers without an owner. Exit code 1: a fleet, a command or an instance does
    not answer or is down, or a check found a problem.
    """
    deployments = [Deployment(url, url)] if url else own_deployments()
    run_async(_look(deployments, admin_key, tls_ca))
    if json:
        sys.stdout.buffer.write(msgspec.json.encode([_to_builtins(deployment) for deployment in deployments]) + b"\n")
    elif not deployments:
        sys.stdout.write("Nothing of yours runs here: kvferry serve MODEL, or kvferry fleet apply SPEC\n")
    else:
        sys.stdout.write("\n".join(line for deployment in deployments for line in lines_of(deployment)) + "\n")
    return 0 if all(deployment.is_sound for deployment in deployments) else 1


def own_deployments() -> list[Deployment]:
    """This user's fleets and commands on this machine."""
    deployments = []
    for name in fleet_names():
        ledger = ledger_of(name)
        seen = ledger.status()
        deployment = Deployment(f"fleet {name}", log=str(ledger.folder / "controller.log"))
        try:
            deployment.title = ledger.desired_state().fleet.model
        except ConfigError as error:
            deployment.problem = str(error)
        deployment.url = seen.url if seen is not None else ""
        if not ledger.has_controller:
            deployment.problem = f"no controller looks after it; kvferry fleet resume {name} starts one"
        elif not deployment.url:
            deployment.problem = f"it does not serve yet; kvferry fleet status {name} says why"
        deployments.append(deployment)
    for record in running_commands():
        deployments.append(
            Deployment(record.command, reachable_url(record.url), record.title, record.since, record.log)
        )
    return deployments


async def _look(deployments: list[Deployment], admin_key: str | None, tls_ca: Path | None) -> None:
    async with Servers(tls_ca, admin_key) as servers:
        for deployment in deployments:
            if not deployment.url:
                continue
            try:
                deployment.results = await servers.check_all(await servers.instances(deployment.url))
            except (KvferryError, ValueError) as error:
                deployment.problem = deployment.problem or str(error)


def lines_of(deployment: Deployment) -> list[str]:
    """The lines about one deployment."""
    up = "" if deployment.since is None else f"up {duration(SYSTEM_CLOCK.wall() - deployment.since)}"
    head = [part for part in (deployment.name, deployment.url, up) if part]
    lines = ["  ".join(dict.fromkeys(head))]
    if deployment.title:
        lines.append(f"  {deployment.title}")
    if deployment.problem:
        lines.append(f"  ✗ {printable(deployment.problem)}")
    for result in deployment.results:
        view = result.instance
        letter = {"prefill": "P", "decode": "D"}.get(view.role, "·")
        checked = "not checked" if not result.is_checked else "check ✓" if not result.problem else "✗"
        engine = view.engine or ""
        lines.append(
            f"  {letter} {printable(view.name):<14} {view.state:<12} {view.in_flight:>4} running"
            f"  {engine:<8} {checked}".rstrip()
        )
        if result.problem:
            lines.append(f"    {printable(result.problem)}")
        if view.no_hand_off:
            lines.append(f"    hands off nothing: {printable(view.no_hand_off)}")
    if any(not result.is_checked and not result.instance.url for result in deployment.results):
        lines.append(
            "  Instances are checked for operators only: --admin-key KEY, or the deployment's KVFERRY_AUTH_TOKEN"
        )
    if deployment.log:
        lines.append(f"  log {shortened(Path(deployment.log))}")
    return lines


def _to_builtins(deployment: Deployment) -> dict[str, Any]:
    return {
        "name": deployment.name,
        "url": deployment.url,
        "title": deployment.title,
        "since": deployment.since,
        "log": deployment.log,
        "problem": deployment.problem,
        "instances": [
            {**msgspec.to_builtins(result.instance), "checked": result.is_checked, "problem": result.problem}
            for result in deployment.results
        ],
    }
