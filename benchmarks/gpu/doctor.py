"""Step *doctor*: driver, GPUs and the links between them, MPS, versions, and the way that UCX takes."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import transfer
from gpu import ucx
from gpu.card import find_cards, links
from gpu.context import Context
from gpu.hand_off import memories
from gpu.mps import mps
from gpu.records import NotPossible

PACKAGES = (
    *("torch", "triton", "transformers", "vllm", "flash-attn", "flashinfer-python", "nixl", "nixl-cu12", "nixl-cu13"),
    *("mooncake-transfer-engine", "lmcache"),
)
ENDING_S = 3.0
"""Seconds that are left at the end of the step when MPS hangs."""


def run(context: Context) -> None:
    """Record all of it as notes; it fails only where PyTorch cannot use the GPU."""
    record = context.record
    for index, card in enumerate(find_cards()):
        record.note(
            f"GPU {index}: {card.name}, {card.memory_mib / 1024:.0f} GiB, compute capability {card.capability}, driver"
            f" {card.driver}, compute mode {card.compute_mode}, PCIe {card.pcie}"
        )
    if context.num_gpus > 1:
        record.note(f"links between the GPUs:\n\n```\n{links()}\n```")
    record.note("versions: " + ", ".join(f"{name} {_version(name) or 'is not installed'}" for name in PACKAGES))
    _vllm(context)
    _torch(context)
    _ucx(context)
    _mps(context)


def _version(package: str) -> str:
    try:
        return str(version(package))
    except PackageNotFoundError:
        return ""


def _vllm(context: Context) -> None:
    """The vLLM that other steps use, where it has an interpreter of its own."""
    try:
        python = context.vllm_python()
    except NotPossible as reason:
        context.record.note(str(reason))
        return
    if python == Path(sys.executable):
        return
    question = "from importlib.metadata import version as v; print('vllm', v('vllm') + ', torch', v('torch'))"
    done = subprocess.run([str(python), "-c", question], capture_output=True, text=True, timeout=10, check=False)
    answer = done.stdout.strip() or (done.stderr.strip().splitlines() or ["no answer"])[-1]
    context.record.note(f"vLLM runs with {python}: {answer}")


def _torch(context: Context) -> None:
    import torch

    if context.small:
        context.record.check("PyTorch computes", (torch.ones(8) * 2).sum().item() == 16)
        return
    total = (torch.ones(8, device="cuda") * 2).sum().item()
    context.record.check("PyTorch computes on the GPU", total == 16, f"the sum of eight twos was {total}")
    properties: Any = torch.cuda.get_device_properties(0)
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    memory = f", memory {2 * clock * width / 8 / 1e6:.0f} GB/s by its clock and width" if clock and width else ""
    context.record.note(
        f"PyTorch for CUDA {torch.version.cuda}, {properties.multi_processor_count} multiprocessors{memory}, NCCL"
        f" {_nccl_version()},"
        f" green contexts {'can' if hasattr(torch.cuda, 'GreenContext') else 'cannot'} be made by PyTorch"
    )


def _nccl_version() -> str:
    import torch

    if not torch.distributed.is_nccl_available():
        return "is missing"
    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version()))


def _ucx(context: Context) -> None:
    """One read through NIXL, with UCX telling the way."""
    if importlib.util.find_spec("nixl") is None:
        context.record.note("NIXL is not installed: hand-offs use CUDA IPC within a machine, and TCP between machines")
        return
    serving, reading = memories(context)
    options = argparse.Namespace(
        blocks=[64],
        repeat=1,
        cores=None,
        memories=(serving, reading),
        environment=ucx.ENVIRONMENT,
        timeout_s=100.0 if context.small else 8.0,
    )
    done = transfer.run("NIXL's API", 1, options)
    (context.folder / "ucx.log").write_text(done.log)
    lanes = ucx.ways_to_read(done.log)
    where = "host memory" if serving == "host" else "device memory"
    if not done.lines:
        context.record.note(f"NIXL does not read {where}: {done.reason}")
    elif not lanes:
        context.record.note(f"NIXL reads {where}; UCX does not say which way it takes")
    elif ucx.is_tcp(lanes):
        context.record.note(
            f"**UCX reads {where} over TCP** ({', '.join(lanes)}), that is, through host memory and the network stack:"
            " NIXL works and is slow, and nothing else says so."
        )
    else:
        context.record.note(f"UCX reads {where} over {', '.join(lanes)}")


def _mps(context: Context) -> None:
    if context.small:
        return
    try:
        with mps(context.scratch("mps"), check_s=max(1.0, context.left_s - ENDING_S)):
            context.record.note("MPS runs: P and D can share a GPU without taking turns")
    except NotPossible as reason:
        context.record.note(f"{reason}; processes that share a GPU take turns")
