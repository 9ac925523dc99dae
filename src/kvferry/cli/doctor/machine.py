"""Findings about this machine. Nothing is changed or started, and nothing takes longer than a few seconds."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from kvferry.cli.doctor.finding import Finding, good, problem, unknown
from kvferry.cli.doctor.hardware import examine_gpus, examine_rdma, hardware_here
from kvferry.cli.home import compiler_version, instruction_set
from kvferry.core.errors import ConfigError
from kvferry.core.folders.cache_dirs import user_cache_dirs
from kvferry.core.host.cgroups import Cgroups
from kvferry.core.host.machine import num_cpus, usable_cores, usable_memory
from kvferry.core.settings import environment
from kvferry.core.settings.units import format_bytes
from kvferry.fleet.backends.local.backend import memory_folder

LIBRARIES = ("torch", "transformers", "nixl", "mooncake-transfer-engine", "lmcache", "valkey", "vllm", "sglang", "ray")
MIN_MEMORY, MIN_SHARED = 2 * 2**30, 256 * 2**20
MIN_FILES = 4096
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_PORT = 8000


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
