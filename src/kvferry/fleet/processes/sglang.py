"""SGLang servers as processes of a fleet: their command lines. SGLang itself is not imported.

P and D are started with `--disaggregation-mode`, P with a port for its bootstrap server, which is declared to the
routers; they then call both at the same time (`router.protocols.sglang`). Flags as of SGLang 0.5.23, whose servers run
in `tests/end_to_end/sglang`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.fleet.processes.process import ExternalServer, ProcessSpec
from kvferry.fleet.processes.ready import StartProgress
from kvferry.fleet.processes.vllm.ports import free_ports, with_event_ports
from kvferry.fleet.spec.fleet_spec import SGLANG_BACKENDS, EngineSpec, MemberRole, check_sglang_transfer
from kvferry.models.catalog import resolve

_BACKEND = "--disaggregation-transfer-backend"
_SET_BY_KVFERRY = (
    *("--model-path", "--model", "--host", "--port", "--served-model-name", "--disaggregation-mode"),
    *("--disaggregation-bootstrap-port", "--enable-metrics"),
)
_KEYS = ("--api-key", "--admin-api-key")
_FIND_SGLANG = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
_STEPS = (
    (re.compile(r"Load weight begin"), StartProgress(0.5, "loading weights")),
    (re.compile(r"KV Cache is allocated"), StartProgress(0.8, "allocated the KV cache")),
)
"""Lines of SGLang's log while a server starts."""


def check_sglang(engine: EngineSpec, arguments: Sequence[str], *, timeout_s: float = 30.0) -> None:
    """Raise `ConfigError` if servers with these settings cannot be started on this machine. `arguments`: flags of all
    servers and those of single roles. `timeout_s`: maximum seconds in which the engine's Python finds SGLang."""
    check_sglang_transfer(engine)
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in _KEYS:
            raise ConfigError(f"engine.args: {name} would stand on the command line of each SGLang server; drop it")
        if name in _SET_BY_KVFERRY:
            raise ConfigError(f"engine.args: {name} is set by kvferry for each SGLang server; leave it out")
        if name == _BACKEND and engine.connector:
            raise ConfigError(f"engine: connector and {_BACKEND} in args say the same; leave one of them out")
    python = engine.python or sys.executable
    if not Path(python).is_file():
        raise ConfigError(f"engine.python = {python!r} is not a file; name a Python interpreter")
    try:
        process = subprocess.run([python, "-c", _FIND_SGLANG], check=False, capture_output=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python = {python!r} cannot be run: {error}") from error
    if process.returncode:
        raise ConfigError(
            f"there is no SGLang in the environment of {python}; install it there, or name the Python of an"
            " environment that has it in engine.python (--engine-python)"
        )


def sglang_server(
    name: str,
    role: MemberRole,
    engine: EngineSpec,
    *,
    model: str,
    served_name: str,
    host: str,
    port: int,
    num_ranks: int,
    switches: bool,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    hidden: frozenset[str],
) -> ProcessSpec:
    """One server, which listens at `host` and `port` (0: any free one). `switches`: it may be told to change its role;
    it then has a bootstrap server from the beginning. `arguments`: further flags of its role."""
    port = port or free_ports(1, host)[0]
    flags = ["--model-path", str(resolve(model)), "--served-model-name", served_name]
    flags += ["--host", host, "--port", str(port)]
    flags += ["--enable-metrics"]  # by which the routers find out if a draining server still has requests
    if num_ranks > 1:
        flags += ["--tp-size", str(num_ranks)]
    all_arguments = with_event_ports((*engine.args, *arguments), host)
    bootstrap_port = free_ports(1, host)[0] if role == "prefill" or switches else None
    if role in ("prefill", "decode"):
        flags += ["--disaggregation-mode", role]
        if not any(flag.partition("=")[0] == _BACKEND for flag in all_arguments):
            flags += [_BACKEND, (engine.connector or SGLANG_BACKENDS)[0]]
    if switches:
        flags += ["--enable-pd-role-switch"]
    if bootstrap_port is not None:
        flags += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return ProcessSpec(
        name=name,
        command=(engine.python or sys.executable, "-m", "sglang.launch_server", *flags, *all_arguments),
        environment=environment,
        hidden=hidden,
        foreign=ExternalServer(url, _STEPS),
        bootstrap_port=bootstrap_port,
    )
