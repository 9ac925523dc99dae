"""`kvferry fleet render`: a fleet's spec as manifests of Kubernetes, or as a Helm chart."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from cyclopts import App, Parameter

from kvferry.core.errors import ConfigError
from kvferry.core.keys import shared_token
from kvferry.core.settings.environment import AUTH_TOKEN
from kvferry.fleet.spec.fleet_spec import DesiredFleet, read_fleet

if TYPE_CHECKING:
    from kvferry.fleet.backends.kubernetes.manifests.autoscaling import Autoscaling, Kind
    from kvferry.fleet.backends.kubernetes.manifests.pod_templates import Object
    from kvferry.fleet.backends.kubernetes.manifests.values import Values


def add_to(fleet: App) -> None:
    """Give `kvferry fleet` this command."""
    fleet.command(render)


def render(
    spec: Annotated[Path, Parameter(help="The fleet's file (TOML), with a table [backend.kubernetes].")],
    *,
    chart: Annotated[
        Path | None, Parameter(help="Write a Helm chart into this folder instead of manifests to standard output.")
    ] = None,
    controller: Annotated[
        Literal["kvferry", "kubernetes"] | None,
        Parameter(
            help="Who makes the pods: kvferry's controller, which follows the spec, or Kubernetes' own, from"
            " Deployments and their like. Default: kvferry's if the spec asks for what only that one does ([scale],"
            ' can_be, or failure.restart = "unit"), unless there is --autoscaler.'
        ),
    ] = None,
    autoscaler: Annotated[
        Literal["hpa", "keda", "none"] | None,
        Parameter(
            help="What has Kubernetes start as many instances as [scale] asks for, without kvferry's controller: a"
            " HorizontalPodAutoscaler for each role (which needs prometheus-adapter), or a ScaledObject of KEDA."
            " Default: hpa for a fleet with [scale] in pooling mode, otherwise none."
        ),
    ] = None,
    prometheus: Annotated[
        str | None,
        Parameter(
            help="URL of Prometheus, for --autoscaler keda, such as http://prometheus-operated.monitoring:9090."
            " Default: KEDA asks the routers."
        ),
    ] = None,
) -> int:
    """Write a fleet as manifests of Kubernetes.

    The Secret with the deployment's token is among them if KVFERRY_AUTH_TOKEN is set:

        kvferry fleet render chat.toml | kubectl apply -f -
    """
    from kvferry.fleet.backends.kubernetes.manifests.chart import write_chart
    from kvferry.fleet.backends.kubernetes.manifests.render import check
    from kvferry.fleet.backends.kubernetes.manifests.values import Values

    fleet = read_fleet(spec)
    check(fleet)
    write = _select_renderer(fleet, controller, autoscaler, prometheus and _url("--prometheus", prometheus))
    if chart is not None:
        try:
            files = write_chart(fleet, chart, lambda values: write(values, ""))
        except OSError as error:
            raise ConfigError(f"--chart {chart}: {error.strerror or error}") from error
        sys.stdout.write("".join(f"{file}\n" for file in files))
        return 0
    token = shared_token("the Secret") if os.environ.get(AUTH_TOKEN) else ""
    values = Values()
    sys.stdout.write(values.write(write(values, token)))
    if not token and _needs_token(fleet):
        sys.stderr.write(f"kvferry: there is no Secret among these, as {AUTH_TOKEN} is not set; {_how(fleet)}\n")
    return 0


def _select_renderer(
    fleet: DesiredFleet, controller: str | None, autoscaler: Kind | None, prometheus: str | None
) -> Callable[[Values, str], list[Object]]:
    """The function that renders the objects, from values and a token. Raises `ConfigError` for contradictory flags, and
    for unsupported ones."""
    from kvferry.fleet.backends.kubernetes.manifests.autoscaling import Autoscaling, chosen
    from kvferry.fleet.backends.kubernetes.manifests.controller_objects import (
        key_needing_controller,
        require_plain_pods,
    )
    from kvferry.fleet.backends.kubernetes.manifests.render import render, render_controller

    asked_for = key_needing_controller(fleet)
    if controller is None and autoscaler is None and asked_for:
        try:
            require_plain_pods(fleet)
            controller = "kvferry"
        except ConfigError as error:
            sys.stderr.write(f"kvferry: Kubernetes' own controllers make the pods, in spite of {asked_for}: {error}\n")
    if controller == "kvferry":
        if autoscaler is not None:
            raise ConfigError(f"--autoscaler {autoscaler}: kvferry's controller starts and ends the pods by itself")
        require_plain_pods(fleet)
        why = f", because of {asked_for}" if asked_for else ""
        sys.stderr.write(f"kvferry: kvferry's controller makes the pods{why}\n")
        return lambda values, token: render_controller(fleet, values, token)
    autoscaling = Autoscaling(chosen(fleet, autoscaler, prometheus or ""), prometheus or "")
    _warn_of_scaling(fleet, autoscaling)
    return lambda values, token: render(fleet, values, token, autoscaling)


def _url(flag: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"{flag} {url!r} must look like http://HOST:PORT, without a user or password")
    return url


def _warn_of_scaling(fleet: DesiredFleet, autoscaling: Autoscaling) -> None:
    from kvferry.fleet.backends.kubernetes.manifests.autoscaling import why_not

    kubernetes = fleet.backend.kubernetes
    if fleet.scale is None or kubernetes is None:
        return
    if autoscaling.kind == "none" and (why := why_not(fleet)):
        sys.stderr.write(f"kvferry: no autoscaler is among these: {why}\n")
    elif (autoscaling.kind == "hpa" or autoscaling.prometheus) and not kubernetes.pod_monitor:
        what = "the routers' /metrics, with the labels namespace and app_kubernetes_io_instance"
        sys.stderr.write(f"kvferry: Prometheus must read {what}; pod_monitor = true has its operator do so\n")


def _needs_token(fleet: DesiredFleet) -> bool:
    kubernetes = fleet.backend.kubernetes
    return kubernetes is not None and kubernetes.token_secret is None


def _how(fleet: DesiredFleet) -> str:
    assert fleet.backend.kubernetes is not None
    return (
        f"make it: kubectl -n {fleet.backend.kubernetes.namespace} create secret generic {fleet.name}-token"
        " --from-literal=token=$(openssl rand -hex 32)"
    )
