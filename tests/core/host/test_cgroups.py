"""Limits of control groups, read from files as the kernel writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.host.cgroups import Cgroups
from kvferry.core.host.machine import num_cpus, require_memory, usable_cores, usable_memory

MIB = 2**20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def version_2(folder: Path, path: str = "/", **files: object) -> Cgroups:
    """A process in the group `path` of a machine with version 2 alone."""
    write(folder / "fs", cgroup__controllers="cpu memory")
    write(folder / "fs" / path.strip("/"), **files)
    (folder / "self").write_text(f"0::{path}\n")
    return Cgroups(folder / "fs", folder / "self")


def version_1(folder: Path, *, seen_at: str, really_at: str = "", **files: object) -> Cgroups:
    """A process whose groups are at `seen_at` on the machine, and at `really_at` in what is mounted."""
    for mount in ("memory", "cpu,cpuacct"):
        write(folder / "fs" / mount / really_at.strip("/"), **files)
    (folder / "self").write_text(f"4:memory:{seen_at}\n2:cpu,cpuacct:{seen_at}\n1:name=systemd:/\n0::/\n")
    return Cgroups(folder / "fs", folder / "self")


def test_version_2_sets_memory_and_cpus(tmp_path: Path) -> None:
    cgroups = version_2(
        tmp_path,
        memory__max=512 * MIB,
        memory__current=300 * MIB,
        memory__stat=f"anon 1\nactive_file {20 * MIB}\ninactive_file {80 * MIB}",
        memory__swap__max=0,
        cpu__max="50000 100000",
    )
    memory = usable_memory(cgroups)
    assert memory.total == 512 * MIB
    assert memory.available == memory.available_with_swap == (512 - 300 + 80 + 10) * MIB
    assert memory.owner == "container"
    assert cgroups.cpus() == 0.5
    assert num_cpus(cgroups) == 1


def test_version_1_sets_memory_and_cpus(tmp_path: Path) -> None:
    files = {
        "memory__limit_in_bytes": 512 * MIB,
        "memory__usage_in_bytes": 100 * MIB,
        "memory__memsw__limit_in_bytes": 512 * MIB,
        "memory__memsw__usage_in_bytes": 100 * MIB,
        "memory__stat": f"inactive_file 5\ntotal_inactive_file {60 * MIB}\ntotal_active_file 0",
        "cpu__cfs_quota_us": 150000,
        "cpu__cfs_period_us": 100000,
    }
    for folder, cgroups in (
        ("host", version_1(tmp_path / "host", seen_at="/pod/a", really_at="/pod/a", **files)),
        ("container", version_1(tmp_path / "container", seen_at="/pod/a", **files)),
    ):
        memory = usable_memory(cgroups)
        assert (memory.total, memory.available) == (512 * MIB, 472 * MIB), folder
        assert cgroups.cpus() == 1.5
        assert num_cpus(cgroups) == 1


def test_the_smallest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    cgroups = version_2(tmp_path, "/kubepods/pod1/container", memory__max="max", cpu__max="max 100000")
    write(tmp_path / "fs/kubepods/pod1", memory__max=300 * MIB, cpu__max="300000 100000")
    write(tmp_path / "fs/kubepods", memory__max=900 * MIB, cpu__max="200000 100000")
    assert usable_memory(cgroups).total - psutil.swap_memory().total <= 300 * MIB
    assert cgroups.cpus() == 2.0
    assert num_cpus(cgroups) == min(2, len(usable_cores()))


def test_memory_high_counts_since_the_kernel_stalls_a_process_beyond_it(tmp_path: Path) -> None:
    cgroups = version_2(tmp_path, memory__max=512 * MIB, memory__high=256 * MIB)
    assert usable_memory(cgroups).available <= 256 * MIB


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory__max": "max", "cpu__max": "max 100000"},
        {"memory__max": 2**62, "cpu__max": "100000 0"},
        {"memory__max": "9" * 5000, "cpu__max": "-1 x"},
        {"memory__max": "", "cpu__max": ""},
        {"memory__max": "²", "cpu__max": "² ²"},
    ],
)
def test_without_a_limit_the_machine_counts(tmp_path: Path, files: dict[str, object]) -> None:
    cgroups = version_2(tmp_path, "/../outside", **files) if not files else version_2(tmp_path, **files)
    memory = usable_memory(cgroups)
    assert memory.owner == "machine"
    assert memory.total == psutil.virtual_memory().total + psutil.swap_memory().total
    assert num_cpus(cgroups) == len(usable_cores())


def test_version_1_without_limits_and_no_groups_at_all(tmp_path: Path) -> None:
    unlimited = {"memory__limit_in_bytes": 2**63 - 4096, "cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100000}
    for cgroups in (
        version_1(tmp_path, seen_at="/a", really_at="/a", **unlimited),
        Cgroups(tmp_path / "nowhere", tmp_path / "no-process"),
    ):
        assert cgroups.memories() == []
        assert cgroups.cpus() is None


def test_what_asks_for_more_than_a_container_has_is_refused_by_name(tmp_path: Path) -> None:
    cgroups = version_2(tmp_path, memory__max=512 * MIB, memory__swap__max=0)
    require_memory(511 * MIB, "a little", cgroups)
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory 1GiB: this container has 512\.0 MiB$"):
        require_memory(2**30, "--kv-cache-memory 1GiB", cgroups)


def test_a_process_in_a_container_sees_its_limits(tmp_path: Path) -> None:
    """With a control group's files mounted where a container has them; needs root."""
    write(tmp_path, cgroup__controllers="cpu memory", memory__max=512 * MIB, cpu__max="100000 100000")
    look = "from kvferry.core.host.machine import *; print(usable_memory().available, num_cpus())"
    mounts = f"mount --make-rprivate / && mount --bind {tmp_path} /sys/fs/cgroup && exec {sys.executable} -c '{look}'"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mounts], check=False, capture_output=True, text=True)
    if "not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("this user cannot mount")
    assert done.stdout.split() == [str(512 * MIB), "1"], done.stderr
