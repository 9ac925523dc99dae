"""The GPUs of this machine, as `nvidia-smi` describes them."""

from __future__ import annotations

import os
import re
import subprocess

import msgspec

COLUMNS = ("name", "driver_version", "compute_cap", "memory.total", "compute_mode", "pcie.link.gen.max")
QUERY_S = 30.0
"""Seconds that `nvidia-smi` may take."""


class Card(msgspec.Struct, frozen=True):
    """One GPU. `memory_mib`: MiB of device memory; `pcie`: generation of the bus."""

    name: str
    driver: str
    capability: str
    memory_mib: int
    compute_mode: str
    pcie: str

    @property
    def slug(self) -> str:
        """The name for files, such as `nvidia-h100-80gb-hbm3`."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


class NoCard(Exception):
    """There is no NVIDIA GPU that can be used; says why."""


def visible_devices() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or UUID; none if it is not set. Raises `NoCard` if it hides
    all."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or names[0] == "-1":
        raise NoCard("CUDA_VISIBLE_DEVICES hides all GPUs")
    return names


def find_cards() -> list[Card]:
    """The GPUs that may be used. Raises `NoCard` if there are none."""
    chosen = [f"--id={','.join(names)}"] if (names := visible_devices()) else []
    query = f"--query-gpu={','.join(COLUMNS)}"
    rows = _nvidia_smi(query, *chosen, "--format=csv,noheader,nounits").strip().splitlines()
    if not rows:
        raise NoCard("nvidia-smi lists no GPU")
    return [_card(row) for row in rows]


def _card(row: str) -> Card:
    fields = [field.strip() for field in row.split(",")]
    if len(fields) != len(COLUMNS):
        raise NoCard(f"nvidia-smi answered {row!r} where {len(COLUMNS)} columns were expected")
    name, driver, capability, memory, mode, pcie = fields
    return Card(name, driver, capability, int(memory) if memory.isdigit() else 0, mode, pcie)


def links() -> str:
    """The matrix of links between the GPUs."""
    lines = _nvidia_smi("topo", "-m").splitlines()
    return "\n".join(line.rstrip() for line in lines if re.match(r"\s*GPU\d|\t", line))


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=QUERY_S, check=True)
    except FileNotFoundError as error:
        raise NoCard("there is no NVIDIA GPU here, or no nvidia-smi on the path") from error
    except subprocess.CalledProcessError as error:
        text = (error.stdout + error.stderr).strip().splitlines() or [f"exit status {error.returncode}"]
        raise NoCard(f"nvidia-smi: {text[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCard(f"nvidia-smi: {error}") from error
    return done.stdout
