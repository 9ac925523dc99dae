"""`kvferry serve`: everything on this machine, ended by one Ctrl-C."""

from __future__ import annotations

import os
from dataclasses import fields

from kvferry.cli.checks import check_before_start
from kvferry.cli.common import (
    ACCESS,
    CHOICE,
    ENGINE,
    FLEET,
    INSTANCE,
    LIMITS,
    LISTEN,
    LOG,
    RESTARTS,
    ROUTER_OPTIONS,
    AccessFlags,
    ChoiceFlags,
    EngineFlags,
    FleetFlags,
    InstanceFlags,
    LimitFlags,
    ListenFlags,
    LogFlags,
    Model,
    ReadyFd,
    RestartFlags,
    RouterOptionFlags,
    run_engine,
    run_fleet,
)
from kvferry.cli.flags import complete
from kvferry.core.transfer_config import parse_transfer_config
from kvferry.engine.config import EngineConfig
from kvferry.fleet.cpu import available_cores, parse_cores, thread_variables
from kvferry.fleet.local import LocalFleet, variable_name
from kvferry.fleet.restart import RestartPolicy
from kvferry.fleet.spec import EngineChoice, FleetSpec, InstanceSpec, Listen
from kvferry.fleet.transfer import check_transfer
from kvferry.http.config import HttpAccess
from kvferry.http.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig


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
    ready_fd: ReadyFd = None,
) -> int:
    """Serve a model on this machine, behind one OpenAI endpoint. Ctrl-C ends everything it started.

    Prefill and decode on different instances, with a router in front:

        kvferry serve kvferry/tiny-python --prefill 1 --decode 1

    Two prefill instances and one decode instance, the KV cache handed over through files:

        kvferry serve kvferry/tiny-python --prefill 2 --kv-transfer-config '{"kv_connector":"SharedStorageConnector",
        "kv_connector_extra_config":{"shared_storage_path":"/tmp/kvferry-blocks"}}'

    One instance that does both, without a router:

        kvferry serve kvferry/tiny-python

    The same with vLLM's servers, which get all arguments after `--`. Name the Python of vLLM's environment if it is not
    kvferry's own:

        kvferry serve MODEL --engine vllm --engine-python /opt/vllm/bin/python --prefill 1 -- --dtype bfloat16

    One of vLLM's own connectors:

        kvferry serve MODEL --engine vllm --prefill 1 --kv-transfer-config '{"kv_connector":"NixlConnector"}'
    """
    policy = complete(RestartPolicy, restarts)
    said = LocalFleet(
        spec=complete(FleetSpec, fleet),
        engine=complete(EngineConfig, engine, model=model),
        instance=complete(InstanceSpec, instance),
        router=complete(RouterConfig, router),
        listen=complete(Listen, listen),
        choice=complete(EngineChoice, choice),
        log=complete(LogConfig, log),
        access=complete(HttpAccess, access),
        limits=complete(HttpLimits, limits),
        hidden=flag_variables(),
    )
    if said.spec.is_split or said.choice.engine == "vllm":
        plan = said.plan()
        if ready_fd is None:
            transfer = said.instance.kv_transfer_config if said.choice.engine == "kvferry" else None
            check_before_start(said.engine, said.choice, said.listen, said.access, said.spec, said.router, transfer)
        return run_fleet(plan, said.listen, ready_fd, said.log, policy)
    return _serve_one(said, ready_fd)


def flag_variables() -> frozenset[str]:
    """The environment variables that set flags."""
    engine = (EngineConfig, EngineChoice, InstanceSpec, FleetSpec, RouterConfig, RestartPolicy, LogConfig)
    configs = (*engine, Listen, HttpAccess, HttpLimits)
    return frozenset({"KVFERRY_CONFIG", *(variable_name(one.name) for config in configs for one in fields(config))})


def _serve_one(said: LocalFleet, ready_fd: int | None) -> int:
    if said.spec.cores is not None:
        cores = parse_cores(said.spec.cores, available_cores())
        os.sched_setaffinity(0, cores)
        os.environ.update(thread_variables(cores))
    text = said.instance.kv_transfer_config
    if text is not None:
        check_transfer(text)
    transfer = None if text is None else parse_transfer_config(text)
    if ready_fd is None:
        check_before_start(said.engine, said.choice, said.listen, said.access)
    return run_engine(
        "both", said.engine, said.instance, said.listen, transfer, said.log, said.access, said.limits, ready_fd
    )
