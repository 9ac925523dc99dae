"""Settings of one engine. Frozen: what is found at run time (block count, chosen dtype) is state, kept elsewhere.

The command line's flags, the TOML table `[engine]` and the environment are generated from this class: a field's
docstring is its flag's help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_bytes

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine: its model, its KV cache, its scheduler."""

    model: str
    """Model to serve: a local directory, a Hugging Face id, or a built-in one such as kvferry/tiny-python."""

    dtype: DType = "auto"
    """Number format of weights and KV; auto takes the checkpoint's own."""

    device: Device = "auto"
    """Where the model runs; auto takes a GPU when there is one."""

    tensor_parallel_size: int = field(default=1, metadata={"alias": "tp"})
    """Ranks that share the model, its weights, its KV cache and its work: processes here, each with a GPU of its own
    on GPUs."""

    max_model_len: int | None = None
    """Longest prompt plus answer, in tokens; the model's own limit when not given."""

    block_size: int = 32
    """Tokens per KV block."""

    kv_cache_memory: str | None = None
    """Size of the KV cache on all ranks, as 512MiB or 2GiB; when not given, a share of what is free."""

    max_num_seqs: int = 128
    """Most sequences that run at once."""

    max_num_batched_tokens: int = 2048
    """Token budget of one step; a longer prefill is cut into chunks of what is left of it."""

    max_waiting: int = 1024
    """Most requests that wait; one more is answered with 429."""

    prefix_caching: bool = True
    """Keep finished blocks for prompts that begin alike."""

    batch_invariant: bool = False
    """Answers that are the same to the bit whatever else is asked at the time. The CPU kernels see to it at no cost;
    where a model, a device or a missing compiler leaves products to PyTorch, every token is then computed by itself,
    which takes several times as long."""

    num_threads: int | None = None
    """CPU threads of the model on all ranks; OMP_NUM_THREADS, or all cores this process may use, when not given."""

    seed: int | None = None
    """Seed of requests that bring none; drawn anew for each request when not given."""

    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.kv_cache_memory is not None and parse_bytes(self.kv_cache_memory, "--kv-cache-memory") < 1:
            raise ConfigError("--kv-cache-memory must be more than 0 bytes")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs"
                f" ({self.max_num_seqs}), or a full batch of decodes does not fit a step"
            )
