"""`kvferry serve`: runs instances and a router on this machine. One Ctrl-C ends all of them. Also chooses the default
numbers of instances."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from kvferry.cli.checks import check_before_start
from kvferry.cli.common import (
    ACCESS,
    CHOICE,
    ENGINE,
    FLEET,
    INSTANCE,
    INSTANCE_ACCESS,
    LIMITS,
    LISTEN,
    LOG,
    RESTARTS,
    ROUTER_OPTIONS,
    AccessFlags,
    ChoiceFlags,
    EngineFlags,
    FleetFlags,
    InstanceAccessFlags,
    InstanceFlags,
    LimitFlags,
    ListenFlags,
    LogFlags,
    Model,
    ReadyFd,
    RestartFlags,
    RouterOptionFlags,
    run_foreground,
)
from kvferry.cli.flags import complete
from kvferry.cli.serving.attended import run_attended
from kvferry.cli.terminal.summary import ServeSummary, summary_of
from kvferry.core.host.machine import has_gpu, num_cpus, usable_cores
from kvferry.core.keys import fleet_token
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.cpu import parse_cores, thread_variables
from kvferry.fleet.processes.process_settings import InstanceProcess
from kvferry.fleet.processes.recipe import recipe_of
from kvferry.fleet.processes.vllm.resources import visible_devices
from kvferry.fleet.spec.fleet_settings import FleetSettings, fleet_of
from kvferry.fleet.spec.kv_transfer import check_transfer
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig

_PARALLEL_FLAGS = (
    *("-tp", "--tp", "--tp-size", "--tensor-parallel-size", "-pp", "--pp", "--pp-size", "--pipeline-parallel-size"),
    *("-dp", "--dp", "--dp-size", "--data-parallel-size"),
)
"""Flags of vLLM and SGLang with which one server takes several GPUs."""


def serve(
    model: Model,
    *,
    fleet: FleetFlags = FLEET,
    restarts: RestartFlags = RESTARTS,
    listen: ListenFlags = LISTEN,
    instance: InstanceFlags = INSTANCE,
    router: RouterOptionFlags = ROUTER_OPTIONS,
    choice: ChoiceFlags = CHOICE,
    engine: EngineFlags = ENGINE,
    log: LogFlags = LOG,
    access: AccessFlags = ACCESS,
    limits: LimitFlags = LIMITS,
    instance_access: InstanceAccessFlags = INSTANCE_ACCESS,
    ready_fd: ReadyFd = None,
) -> int:
    r"""Serve a model on this machine, behind one OpenAI endpoint. Ctrl-C ends everything it started.

    One prefill and one decode instance, where there are two cores or GPUs, and a router in front:

        kvferry serve kvferry/tiny-python

    Two prefill instances and one decode instance:

        kvferry serve kvferry/tiny-python --prefill 2

    One instance that does both, without a router:

        kvferry serve kvferry/tiny-python --prefill 0

    The same with vLLM's servers, which get all arguments after `--`, and one of vLLM's own connectors. Name the Python
    of vLLM's environment if it is not kvferry's own:

        kvferry serve MODEL --engine vllm --engine-python /opt/vllm/bin/python \
          --prefill 1 --kv-transfer-config '{"kv_connector":"NixlConnector"}' \
          -- --dtype bfloat16

    On a Ray cluster that this machine is in:

        kvferry serve MODEL --prefill 2 --decode 2 --backend ray
    """
    spec = complete(FleetShapeSettings, fleet)
    settings = FleetSettings(
        spec=spec,
        engine=complete(EngineConfig, engine, model=model),
        instance=complete(InstanceSettings, instance),
        router=complete(RouterConfig, router),
        listen=complete(ListenSettings, listen),
        choice=complete(EngineChoice, choice),
        log=complete(LogConfig, log),
        access=complete(HttpAccess, access),
        limits=complete(HttpLimits, limits),
        restarts=complete(RestartPolicy, restarts),
        instance_access=complete(InstanceAccess, instance_access),
    )
    counts = ""
    if ready_fd is None:
        devices = devices_here(spec, settings.engine)
        counted_spec, counts = with_default_counts(spec, settings.engine, settings.choice, settings.instance, devices)
        settings = replace(settings, spec=counted_spec)
    if not settings.spec.is_split and settings.choice.engine == "kvferry" and settings.spec.backend == "local":
        return _serve_one(settings, ready_fd, counts)
    token = fleet_token()
    desired = fleet_of("kvferry", settings)
    make_recipe = partial(recipe_of, token=token)
    make_recipe(desired)
    if ready_fd is None:
        check_before_start(
            settings.engine,
            settings.choice,
            settings.listen,
            settings.access,
            settings.spec,
            settings.router,
            settings.instance.kv_transfer_config,
        )
    return run_attended(
        desired,
        make_recipe,
        token=token,
        grace_s=settings.listen.grace_s,
        ready_fd=ready_fd,
        log=settings.log,
        summary=_summary(settings, counts),
    )


def _title(settings: FleetSettings, counts: str) -> str:
    """`counts`: the line about the default numbers of instances; empty: there is none."""
    spec, engine = settings.spec, settings.choice.engine
    instances = f"{spec.num_prefill} P + {spec.num_decode} D" if spec.is_split else "one instance"
    name = "kvferry's engine" if engine == "kvferry" else engine
    return "\n".join(filter(None, (f"{settings.engine.model} · {instances} · {name}", counts)))


def _summary(settings: FleetSettings, counts: str) -> ServeSummary:
    spec = settings.spec
    return summary_of(
        "serve",
        settings.listen,
        settings.access,
        title=_title(settings, counts),
        models=settings.instance.served_model_name or (settings.engine.model,),
        has_page=(spec.is_split or spec.backend != "local")
        and settings.router.page
        and settings.access.admin_port is None,
    )


def _serve_one(settings: FleetSettings, ready_fd: int | None, counts: str) -> int:
    """Run one instance as this process, without a fleet."""
    if settings.spec.cores is not None:
        cores = parse_cores(settings.spec.cores, usable_cores())
        os.sched_setaffinity(0, cores)
        os.environ.update(thread_variables(num_cpus()))
    text = settings.instance.kv_transfer_config
    if text is not None:
        check_transfer(text)
    if ready_fd is None:
        check_before_start(settings.engine, settings.choice, settings.listen, settings.access, transfer=text)
    process = InstanceProcess(
        role="both",
        engine=settings.engine,
        instance=settings.instance,
        listen=settings.listen,
        log=settings.log,
        access=settings.access,
        limits=settings.limits,
        page_tick_s=settings.router.page_tick_s if settings.router.page else None,
    )
    models = settings.instance.served_model_name or (settings.engine.model,)
    has_page = settings.router.page and settings.access.admin_port is None
    summary = summary_of(
        "serve",
        settings.listen,
        settings.access,
        title=_title(settings, counts),
        models=models,
        has_page=has_page,
        page_views="load, chat",
    )
    return run_foreground(process, "engine", ready_fd, summary)


@dataclass(frozen=True)
class Devices:
    """Devices that instances compute on: GPUs if there are any, otherwise cores."""

    num_cores: int
    num_gpus: int = 0

    @property
    def count(self) -> int:
        """Number of devices."""
        return self.num_gpus or self.num_cores

    def __str__(self) -> str:
        number = {1: "one", 2: "two"}.get(self.count, str(self.count))
        return f"{number} {'GPU' if self.num_gpus else 'core'}{'' if self.count == 1 else 's'}"


def devices_here(spec: FleetShapeSettings, engine: EngineConfig, dev: Path = Path("/dev")) -> Devices:
    """The devices of this machine, as far as these settings allow them. `dev`: the folder with its device files."""
    cores = usable_cores() if spec.cores is None else parse_cores(spec.cores, usable_cores())
    num_gpus = max(1, len(visible_devices(os.environ, dev))) if engine.device != "cpu" and has_gpu(dev) else 0
    return Devices(min(len(cores), num_cpus()), num_gpus)


def with_default_counts(
    spec: FleetShapeSettings, engine: EngineConfig, choice: EngineChoice, instance: InstanceSettings, devices: Devices
) -> tuple[FleetShapeSettings, str]:
    """Start one prefill and one decode instance if there are two devices and no setting decides the counts or the
    parallelism. Returns the spec and a line for the user; the line is empty if the settings have decided."""
    names = {argument.partition("=")[0] for argument in choice.engine_argument}
    is_parallel = engine.tensor_parallel_size > 1 or not names.isdisjoint(_PARALLEL_FLAGS)
    is_decided = spec.prefill is not None or spec.decode is not None or spec.backend != "local"
    if is_decided or is_parallel or instance.kv_transfer_config is not None or instance.register:
        return spec, ""
    if devices.count < 2:
        return spec, f"One instance for {devices}; --prefill 1 separates prefill (P) and decode (D)."
    counted_spec = msgspec.structs.replace(spec, prefill=1, decode=1)
    return counted_spec, f"One prefill (P) and one decode (D) instance for {devices}; --prefill 0 for one."
