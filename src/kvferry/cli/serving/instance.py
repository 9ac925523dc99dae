"""`kvferry prefill` and `kvferry decode`: one instance, in this process."""

from __future__ import annotations

import msgspec

from kvferry.cli.checks import check_before_start
from kvferry.cli.common import (
    ACCESS,
    CHOICE,
    ENGINE,
    INSTANCE,
    LIMITS,
    LISTEN,
    LOG,
    AccessFlags,
    ChoiceFlags,
    EngineFlags,
    InstanceFlags,
    LimitFlags,
    ListenFlags,
    LogFlags,
    Model,
    ReadyFd,
    run_foreground,
)
from kvferry.cli.flags import complete
from kvferry.cli.serving.attended import run_attended
from kvferry.cli.terminal.summary import summary_of
from kvferry.core.keys import shared_token
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.process_settings import InstanceProcess
from kvferry.fleet.processes.recipe import LocalRecipe, require_defaults
from kvferry.fleet.spec.arguments import refuse_own_flags
from kvferry.fleet.spec.fleet_settings import FleetSettings, engine_of, failing
from kvferry.fleet.spec.fleet_spec import DesiredFleet, RoleSpec, RouterSpec
from kvferry.fleet.spec.kv_transfer import DEFAULT, InstanceRole, transfer_for
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.fleet.spec.variables import flag_variables
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig


def prefill(
    model: Model,
    *,
    choice: ChoiceFlags = CHOICE,
    engine: EngineFlags = ENGINE,
    instance: InstanceFlags = INSTANCE,
    listen: ListenFlags = LISTEN,
    log: LogFlags = LOG,
    access: AccessFlags = ACCESS,
    limits: LimitFlags = LIMITS,
    ready_fd: ReadyFd = None,
) -> int:
    """Start one prefill instance: it computes prompts, and hands their KV cache to decode instances.

    Put a router in front of it, and name it there with --prefill-url:

        kvferry prefill kvferry/tiny-python --port 8001

    A vLLM server as a prefill instance; arguments after `--` are passed to vLLM:

        kvferry prefill MODEL --engine vllm --port 8001 -- --dtype bfloat16
    """
    return _run("prefill", model, choice, engine, instance, listen, log, access, limits, ready_fd)


def decode(
    model: Model,
    *,
    choice: ChoiceFlags = CHOICE,
    engine: EngineFlags = ENGINE,
    instance: InstanceFlags = INSTANCE,
    listen: ListenFlags = LISTEN,
    log: LogFlags = LOG,
    access: AccessFlags = ACCESS,
    limits: LimitFlags = LIMITS,
    ready_fd: ReadyFd = None,
) -> int:
    """Start one decode instance: it fetches the KV cache of prompts, and generates the answers.

    It can compute prompts too, and does so if there is no prefill instance:

        kvferry decode kvferry/tiny-python --port 8002

    A vLLM server as a decode instance:

        kvferry decode MODEL --engine vllm --port 8002 -- --dtype bfloat16
    """
    return _run("decode", model, choice, engine, instance, listen, log, access, limits, ready_fd)


def _run(
    role: InstanceRole,
    model: str,
    choice: ChoiceFlags,
    engine: EngineFlags,
    instance: InstanceFlags,
    listen: ListenFlags,
    log: LogFlags,
    access: AccessFlags,
    limits: LimitFlags,
    ready_fd: int | None,
) -> int:
    spec, where, logs = complete(InstanceSettings, instance), complete(ListenSettings, listen), complete(LogConfig, log)
    settings, chosen = complete(EngineConfig, engine, model=model), complete(EngineChoice, choice)
    accesses, bounds = complete(HttpAccess, access), complete(HttpLimits, limits)
    if chosen.engine != "kvferry":
        require_defaults(accesses, bounds)
        return _run_server(role, settings, chosen, spec, where, logs, accesses, ready_fd)
    transfer = transfer_for(spec.kv_transfer_config or DEFAULT, role)
    if ready_fd is None:
        check_before_start(settings, chosen, where, accesses, transfer=transfer)
    process = InstanceProcess(
        role=role,
        engine=settings,
        instance=msgspec.structs.replace(spec, kv_transfer_config=transfer),
        listen=where,
        log=logs,
        access=accesses,
        limits=bounds,
    )
    summary = summary_of(
        role, where, accesses, models=spec.served_model_name or (settings.model,), answers_clients=False
    )
    return run_foreground(process, role, ready_fd, summary)


def _run_server(
    role: InstanceRole,
    engine: EngineConfig,
    choice: EngineChoice,
    instance: InstanceSettings,
    listen: ListenSettings,
    log: LogConfig,
    access: HttpAccess,
    ready_fd: int | None,
) -> int:
    """Run one server of vLLM or SGLang, as a fleet of one instance without a router."""
    refuse_own_flags(engine, choice.engine)
    fleet = DesiredFleet(
        name=choice.engine,
        model=engine.model,
        mode="pooling",
        engine=engine_of(choice, instance),
        role={role: RoleSpec()},
        router=RouterSpec(count=0),
        failure=failing(RestartPolicy()),
    )
    settings = FleetSettings(
        spec=FleetShapeSettings(),
        engine=engine,
        instance=instance,
        listen=listen,
        choice=choice,
        log=log,
        access=access,
    )
    recipe = LocalRecipe(fleet=fleet, settings=settings, token=shared_token(), hidden=flag_variables())
    recipe.check()
    check_before_start(engine, choice, listen, access)
    return run_attended(
        fleet,
        lambda _: recipe,
        token="",
        grace_s=listen.grace_s,
        ready_fd=ready_fd,
        log=log,
        summary=summary_of(
            role,
            listen,
            access,
            title=f"{engine.model} · one {role} instance · {choice.engine}",
            models=instance.served_model_name or (engine.model,),
            answers_clients=False,
        ),
    )
