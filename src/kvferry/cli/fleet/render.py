"""`kvferry fleet render`: writes a fleet's spec as manifests for Kubernetes, or as a Helm chart."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvferry.core.errors import ConfigError
from kvferry.core.keys import shared_token
from kvferry.core.settings.environment import AUTH_TOKEN
from kvferry.fleet.spec.fleet_spec import DesiredFleet, read_fleet


def add_to(fleet: App) -> None:
    """Give `kvferry fleet` this command."""
    fleet.command(render)


def render(
    spec: Annotated[Path, Parameter(help="The fleet's file (TOML), with a table [backend.kubernetes].")],
    *,
    chart: Annotated[
        Path | None, Parameter(help="Write a Helm chart into this folder instead of manifests to standard output.")
    ] = None,
) -> int:
    """Write a fleet as manifests for Kubernetes.

    The Secret with the deployment's token is among them if KVFERRY_AUTH_TOKEN is set:

        kvferry fleet render chat.toml | kubectl apply -f -
    """
    from kvferry.fleet.backends.kubernetes.manifests import render as manifests
    from kvferry.fleet.backends.kubernetes.manifests.chart import write_chart
    from kvferry.fleet.backends.kubernetes.manifests.values import Values

    fleet = read_fleet(spec)
    manifests.check(fleet)
    if chart is not None:
        try:
            files = write_chart(fleet, chart, lambda values: manifests.render(fleet, values))
        except OSError as error:
            raise ConfigError(f"--chart {chart}: {error.strerror or error}") from error
        sys.stdout.write("".join(f"{file}\n" for file in files))
        return 0
    token = shared_token("the Secret") if os.environ.get(AUTH_TOKEN) else ""
    values = Values()
    sys.stdout.write(values.write(manifests.render(fleet, values, token)))
    if not token and _needs_token(fleet):
        sys.stderr.write(
            f"kvferry: there is no Secret among these, as {AUTH_TOKEN} is not set; {_token_command(fleet)}\n"
        )
    return 0


def _needs_token(fleet: DesiredFleet) -> bool:
    kubernetes = fleet.backend.kubernetes
    return kubernetes is not None and kubernetes.token_secret is None


def _token_command(fleet: DesiredFleet) -> str:
    assert fleet.backend.kubernetes is not None
    return (
        f"make it: kubectl -n {fleet.backend.kubernetes.namespace} create secret generic {fleet.name}-token"
        " --from-literal=token=$(openssl rand -hex 32)"
    )
