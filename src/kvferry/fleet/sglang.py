"""SGLang servers as processes of a fleet: their command lines. SGLang itself is not imported.

P and D are started with `--disaggregation-mode`, P with a port for its bootstrap server, of which the routers are told;
they then call both together (`router.protocols.sglang`). Flags as of SGLang 0.5; they have **never run** with SGLang's
servers, which need a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.fleet.control.spec import SGLANG_BACKENDS, EngineSpec, MemberRole
from kvferry.fleet.process import Foreign, ProcessSpec
from kvferry.fleet.vllm.ports import free_ports
from kvferry.models.catalog import resolve

_SET = ("--model-path", "--model", "--host", "--port", "--served-model-name", "--disaggregation-mode")
_SET_TOO = ("--disaggregation-transfer-backend", "--disaggregation-bootstrap-port")
"""SGLang's flags that kvferry sets."""
_KEYS = ("--api-key", "--admin-api-key")
_LOOK_S = 30.0


def check_sglang(engine: EngineSpec, arguments: Sequence[str]) -> None:
    """Raise `ConfigError` if servers of these settings cannot be started on this machine. `arguments`: all that are
    given, those of roles too."""
    for one in arguments:
        if (name := one.partition("=")[0]) in _KEYS:
            raise ConfigError(f"engine.args: {name} would stand on the command line of each SGLang server; drop it")
        if name in (*_SET, *_SET_TOO):
            raise ConfigError(f"engine.args: {name} is set by kvferry for each SGLang server; leave it out")
    python = engine.python or sys.executable
    if not Path(python).is_file():
        raise ConfigError(f"engine.python = {python!r} is not a file; name a Python interpreter")
    question = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
    try:
        found = subprocess.run([python, "-c", question], check=False, capture_output=True, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python = {python!r} cannot be run: {error}") from error
    if found.returncode:
        raise ConfigError(
            f"there is no SGLang in the environment of {python}; install it there, or name the Python of an"
            " environment that has it in engine.python"
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
    arguments: Sequence[str],
    environment: Mapping[str, str],
    hidden: frozenset[str],
) -> ProcessSpec:
    """One server, which listens at `host` and `port` (0: any free one). `arguments`: further ones of its role."""
    port = port or free_ports(1, host)[0]
    told = ["--model-path", str(resolve(model)), "--served-model-name", served_name]
    told += ["--host", host, "--port", str(port)]
    told += ["--enable-metrics"]  # in which the routers see whether one that is drained still works
    if num_ranks > 1:
        told += ["--tp-size", str(num_ranks)]
    bootstrap_port = free_ports(1, host)[0] if role == "prefill" else None
    if role in ("prefill", "decode"):
        told += ["--disaggregation-mode", role]
        told += ["--disaggregation-transfer-backend", (engine.connector or SGLANG_BACKENDS)[0]]
    if bootstrap_port is not None:
        told += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return ProcessSpec(
        name=name,
        command=(engine.python or sys.executable, "-m", "sglang.launch_server", *told, *engine.args, *arguments),
        environment=environment,
        hidden=hidden,
        foreign=Foreign(url),
        bootstrap_port=bootstrap_port,
    )
