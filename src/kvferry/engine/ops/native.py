"""The CPU kernels of `cpu/`, compiled for this machine at first use (`core.compiled`) and called through ctypes.

KVFERRY_ISA selects the kernels of another instruction set (ISAS), to test them or to compare machines.

They are a plain shared library rather than a PyTorch extension: it compiles in seconds, needs no torch headers, and a
call costs microseconds. Without it, `library()` is None and plain PyTorch is used. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from kvferry.core.compiled import NotCompiled, compiled
from kvferry.core.settings import environment

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-Wno-psabi")
ISA = environment.ISA
_EVERY_FMA = "--param=avoid-fma-max-bits=0"
"""Tuned for some processors (AMD's Zen), GCC multiplies and adds separately in chains of additions that it finds; then
a row would depend on the number of rows in its batch."""
ISAS = {
    "native": ("-march=native", _EVERY_FMA),
    "amx-emulated": ("-march=native", _EVERY_FMA, "-DEMULATE_AMX"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "sse": ("-march=x86-64-v2",),
}
"""Compiler flags by the name of the instruction set. `amx-emulated` is for tests: very slow, and it needs AVX-512."""


class LinearCall(ctypes.Structure):
    """Mirrors `LinearCall` of cpu/linear.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "residual", "out")),
        *((name, c_int64) for name in ("rows", "depth", "columns", "x_stride", "out_stride", "gate")),
    ]


class AttentionCall(ctypes.Structure):
    """Mirrors `AttentionCall` of cpu/attention.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "cache", "out", "query_starts", "context_lens", "block_tables")),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("num_sequences", "table_stride", "query_token_stride", "query_head_stride")),
        *((name, c_int64) for name in ("block_stride", "head_stride", "heads", "kv_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("block_size", "causal", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
    ]


class ExpertsCall(ctypes.Structure):
    """Mirrors `ExpertsCall` of cpu/experts.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "enter", "leave", "enter_bias", "leave_bias", "chosen", "shares", "out")),
        *((name, c_int64) for name in ("tokens", "top_k", "experts", "hidden", "middle", "x_stride", "gate", "gated")),
        *((name, c_float) for name in ("limit", "alpha")),
    ]


class WriteCall(ctypes.Structure):
    """Mirrors `WriteCall` of cpu/small.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("cache", "key", "value", "slots")),
        *((name, c_int64) for name in ("tokens", "kv_heads", "block_size", "key_bytes", "value_bytes")),
        *((name, c_int64) for name in ("block_stride", "head_stride", "key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
    ]


class NormCall(ctypes.Structure):
    """Mirrors `NormCall` of cpu/small.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "out")),
        *((name, c_int64) for name in ("outer", "inner", "size", "outer_stride", "inner_stride")),
        *((name, c_int64) for name in ("out_outer_stride", "out_inner_stride", "round_first")),
        ("epsilon", c_float),
    ]


class RotateCall(ctypes.Structure):
    """Mirrors `RotateCall` of cpu/small.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "cosine", "sine")),
        *((name, c_int64) for name in ("tokens", "heads", "size", "token_stride", "head_stride")),
    ]


class KernelStep(ctypes.Structure):
    """Mirrors `KernelStep` of cpu/kernels.cpp: a kind and the address of that kind's call."""

    _fields_ = [("kind", c_int64), ("call", c_void_p)]

    KINDS = (LinearCall, NormCall, RotateCall)


_SIGNATURES = {
    "vector_length": ([], c_int64),
    "packed_units": ([c_int64] * 3, c_int64),
    "set_threads": ([c_int64], None),
    "pack_weight": ([c_void_p, c_int64, c_int64, c_void_p, c_int64], None),
    "linear": ([c_void_p, c_int64], None),
    "experts": ([c_void_p, c_int64], None),
    "paged_attention": ([c_void_p, c_int64], None),
    "write_kv": ([c_void_p], None),
    "run_steps": ([c_void_p, c_int64, c_int64, c_int64], None),
    "rms_norm": ([c_void_p, c_int64], None),
    "rotate": ([c_void_p, c_int64], None),
    "most_likely_permitted": ([c_void_p, c_void_p, c_int64], c_int64),
}


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; None, with one line in the log, if they are not available. The first call may compile them."""
    try:
        loaded = ctypes.CDLL(str(_built()))
    except (NotCompiled, OSError) as error:
        if str(error):
            logger.warning("CPU kernels are not available, plain PyTorch is used instead, which is slower: %s", error)
        return None
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    loaded.set_threads(torch.get_num_threads())
    return loaded


def _built() -> Path:
    headers, isa = sorted(SOURCES.glob("*.h")), os.environ.get(ISA) or "native"
    if isa not in ISAS:
        raise NotCompiled(f"{ISA} is {isa!r}, which is not one of {', '.join(ISAS)}")
    return compiled([SOURCES / "kernels.cpp", *headers], (*FLAGS, *ISAS[isa]), _openmp(), depends_on=torch.__version__)


def _openmp() -> list[str]:
    """torch's own OpenMP runtime, to link with: two runtimes in one process would compete for the cores."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(path) for path in libraries]
