"""Findings about this machine: what kvferry needs of it, and its GPUs, the links between them and RDMA, from what
drivers' tools print and /sys says. Changes nothing. It runs these tools, each for a few seconds at most."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path

from kvferry.cli.doctor.finding import Finding, good, problem, unknown
from kvferry.cli.home import compiler_version, instruction_set
from kvferry.core.errors import ConfigError
from kvferry.core.folders.cache_dirs import user_cache_dirs
from kvferry.core.host.cgroups import Cgroups
from kvferry.core.host.machine import has_gpu, num_cpus, usable_cores, usable_memory
from kvferry.core.settings import environment
from kvferry.core.settings.units import format_bytes
from kvferry.fleet.backends.local.backend import memory_folder

LIBRARIES = ("torch", "transformers", "nixl", "mooncake-transfer-engine", "lmcache", "valkey", "vllm", "sglang", "ray")
MIN_MEMORY, MIN_SHARED = 2 * 2**30, 256 * 2**20
MIN_FILES = 4096
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_PORT = 8000

_TOOL_S = 5.0
_MAX_NAMED = 4
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_UCX_TRANSPORT = re.compile(r"^#\s+Transport:\s+(\S+)", re.M)
_RDMA_FAMILIES = ("rc", "dc", "ud")
"""UCX's transports over RDMA; each has variants: rc_mlx5, rc_verbs, rc_x."""


def examine_machine(variables: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """All findings about this machine."""
    yield _processor()
    yield _memory()
    yield from _containers()
    yield _shared_memory()
    yield _files()
    yield _kernels(variables)
    yield _libraries()
    hardware = hardware_here(variables)
    yield from examine_gpus(hardware)
    yield from examine_rdma(hardware)
    yield from _proxy(variables)
    yield _port(_PORT)


def _processor() -> Finding:
    text = f"{num_cpus()} cores, {instruction_set()}"
    if num_cpus() < 2:
        return problem(f"{text}: P and D share it, and stall each other", "kvferry serve MODEL --prefill 0")
    return good(text)


def _memory() -> Finding:
    memory = usable_memory()
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} of memory free ({memory.owner})"
    if memory.available < MIN_MEMORY:
        return problem(text, "end what uses it, or serve a smaller model with --kv-cache-memory 256MiB")
    return good(text)


def _containers() -> Iterator[Finding]:
    groups = Cgroups()
    quota = groups.cpus()
    if quota is not None:
        cores = len(usable_cores())
        yield good(f"the control group allows {quota:g} of {cores} cores' time")
    for group in groups.memories():
        if group.limit < 2**50:
            yield good(f"the control group allows {format_bytes(group.limit)}, {format_bytes(group.used)} in use")
            break


def _shared_memory() -> Finding:
    folder = memory_folder()
    if folder is None:
        return problem(
            "there is no /dev/shm: KV cannot go through shared memory", "docker run --shm-size=8g, or an emptyDir"
        )
    free = shutil.disk_usage(folder).free
    if free < MIN_SHARED:
        return problem(f"{folder} has {format_bytes(free)} free", "docker run --shm-size=8g, or remove files there")
    return good(f"{folder}: {format_bytes(free)} free")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_FILES:
        return problem(f"at most {hard} open files: a router needs one for each connection", "ulimit -Hn 65536")
    return good(f"open files: {soft}, up to {hard}")


def _kernels(variables: Mapping[str, str]) -> Finding:
    if variables.get(environment.NATIVE) == "0":
        return problem(
            f"{environment.NATIVE}=0: kernels, copies and streams run in Python", f"unset {environment.NATIVE}"
        )
    with suppress(ConfigError, OSError):
        if any(list((folder / "kernels").glob("*.so")) for folder in user_cache_dirs()):
            return good(f"{compiler_version()}; kernels are compiled")
    if compiler_version() == "no C++ compiler":
        return problem("no C++ compiler: kernels, copies and streams run in Python", "apt-get install g++")
    return good(f"{compiler_version()}; kernels are compiled at the first start")


def _libraries() -> Finding:
    versions = [f"Python {sys.version_info.major}.{sys.version_info.minor}"]
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name.removesuffix('-transfer-engine')} {version(name)}")
    if not any(text.startswith("torch ") for text in versions):
        return problem(", ".join(versions) + ": no torch", "pip install torch")
    return good(", ".join(versions))


def _proxy(variables: Mapping[str, str]) -> Iterator[Finding]:
    name = next((name for name in _PROXIES if variables.get(name)), None)
    if name is None:
        return
    excluded = f"{variables.get('NO_PROXY', '')},{variables.get('no_proxy', '')}"
    if not any(host in excluded for host in ("127.0.0.1", "*")):
        yield problem(
            f"{name} is set, and 127.0.0.1 is not in NO_PROXY: clients ask the proxy for kvferry",
            "export NO_PROXY=127.0.0.1,localhost",
        )


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return unknown(f"port {port} is in use; --port 0 takes a free one")
    return good(f"port {port} is free")


def run_tool(*command: str) -> str | None:
    """Standard output of a program; None: it is not installed, fails, or takes longer than 5 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


@dataclass(frozen=True)
class Hardware:
    """The machine that is examined. `tool`: runs a program, like `run_tool`; `memlock`: bytes that a process may lock,
    -1: no limit; `nixl`: the installed version, None: not installed."""

    variables: Mapping[str, str]
    tool: Callable[..., str | None] = run_tool
    dev: Path = Path("/dev")
    sys: Path = Path("/sys")
    memlock: int = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    nixl: str | None = None


def hardware_here(variables: Mapping[str, str]) -> Hardware:
    """This machine."""
    nixl = None
    with suppress(PackageNotFoundError):
        nixl = version("nixl")
    return Hardware(variables, nixl=nixl)


def examine_gpus(hardware: Hardware) -> Iterator[Finding]:
    """GPUs, and the links between them."""
    if not has_gpu(hardware.dev):
        yield good("no GPU: kvferry's engine computes on the cores")
        return
    if not any((hardware.dev / name).exists() for name in ("nvidiactl", "dxg")):
        yield unknown("an AMD GPU: the doctor examines NVIDIA's only")
        return
    names = hardware.tool("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    if not names:
        yield problem("there is a GPU's device, and nvidia-smi does not answer", "nvidia-smi")
        return
    gpus = [name.strip() for name in names.splitlines()]
    for name, count in Counter(gpus).items():
        yield good(f"{count} × {name}" if count > 1 else name)
    if len(gpus) > 1:
        yield _links_of_gpus(hardware.tool("nvidia-smi", "topo", "-m") or "")


def read_topology(matrix: str) -> dict[tuple[str, str], str]:
    """The link of each pair of GPUs in the output of `nvidia-smi topo -m`: NV18, PIX, SYS, …"""
    lines = [_ESCAPES.sub("", line).split() for line in matrix.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    rows = {line[0]: line[1:] for line in lines if line and line[0] in columns and line is not header}
    return {
        (first, second): rows[first][columns.index(second)]
        for first, second in combinations(columns, 2)
        if len(rows.get(first, ())) > columns.index(second)
    }


def _links_of_gpus(matrix: str) -> Finding:
    links = read_topology(matrix)
    if not links:
        return unknown("the links between GPUs are not known: nvidia-smi topo -m does not say")
    slow = [f"{first}-{second} {link}" for (first, second), link in links.items() if not link.startswith("NV")]
    if not slow:
        return good(f"GPUs are joined by NVLink ({', '.join(sorted(set(links.values())))})")
    names = ", ".join(slow[:_MAX_NAMED]) + (", …" if len(slow) > _MAX_NAMED else "")
    return unknown(f"{len(slow)} of {len(links)} pairs of GPUs are joined by PCIe, not NVLink: {names}")


def examine_rdma(hardware: Hardware) -> Iterator[Finding]:
    """RDMA devices; and a warning if NIXL would move KV over TCP without an error."""
    devices = sorted((hardware.sys / "class" / "infiniband").glob("*"))
    active = {device.name: ports for device in devices if (ports := _active_ports(device))}
    if active:
        yield good(f"RDMA: {', '.join(f'{name} ({ports[0]})' for name, ports in active.items())}")
    if down := [device.name for device in devices if device.name not in active]:
        text = f"no port of {', '.join(down)} is active"
        yield unknown(text) if active else problem(f"RDMA: {text}: KV goes over TCP", "rdma link show")
    if active:
        yield from _access_to_rdma(hardware)
    if hardware.nixl is not None:
        yield from _nixl(hardware, has_rdma=bool(active))


def _active_ports(device: Path) -> list[str]:
    """Link layer and rate of each active port."""
    ports = []
    for port in sorted((device / "ports").glob("*")):
        with suppress(OSError):
            if "ACTIVE" in (port / "state").read_text().split():
                ports.append(f"{(port / 'link_layer').read_text().strip()}, {(port / 'rate').read_text().strip()}")
    return ports


def _access_to_rdma(hardware: Hardware) -> Iterator[Finding]:
    if not any((hardware.dev / "infiniband").glob("uverbs*")):
        yield problem(
            "RDMA: there is no /dev/infiniband/uverbs* here: KV goes over TCP", "docker run --device /dev/infiniband"
        )
    if hardware.memlock != resource.RLIM_INFINITY:
        yield problem(
            f"at most {format_bytes(hardware.memlock)} may be locked, which RDMA needs for KV", "ulimit -l unlimited"
        )


def _nixl(hardware: Hardware, *, has_rdma: bool) -> Iterator[Finding]:
    selected = hardware.variables.get("UCX_TLS", "")
    if not has_rdma:
        yield unknown(f"NIXL {hardware.nixl} between machines goes over TCP: there is no RDMA device here")
    elif not _selects(selected, _RDMA_FAMILIES, alias="ib"):
        yield problem(f"UCX_TLS={selected} leaves NIXL no RDMA: KV goes over TCP", "unset UCX_TLS")
    elif (transports := hardware.tool("ucx_info", "-d")) is not None:
        families = {name.partition("_")[0] for name in _UCX_TRANSPORT.findall(transports)}
        if families.isdisjoint(_RDMA_FAMILIES):
            yield problem("this machine's UCX has no transport over RDMA: KV goes over TCP", "ucx_info -d")
    if has_gpu(hardware.dev) and not _selects(selected, ("cuda",), alias="cuda"):
        yield problem(f"UCX_TLS={selected} leaves NIXL no GPU memory", "unset UCX_TLS")


def _selects(selected: str, families: tuple[str, ...], alias: str) -> bool:
    """True if a value of UCX_TLS allows a transport of these families. `alias`: UCX's name for all of them."""
    names = [name.strip().lstrip("\\") for name in selected.removeprefix("^").split(",") if name.strip()]
    if not names:
        return True
    listed = {name if name in (alias, "all") else name.partition("_")[0] for name in names}
    if not selected.startswith("^"):
        return bool(listed & {alias, "all", *families})
    excluded = set(names)
    return alias not in excluded and not excluded.issuperset(families)
