"""Settings of one engine. Frozen: what is found at run time (block count, chosen dtype) is state, kept elsewhere.

The command line's flags, the TOML table `[engine]` and the environment are generated from this class: a field's
docstring is its flag's help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_bytes
from kvferry.engine.model.patch_names import require_known_patches
from kvferry.kv_events.sockets import require_endpoint

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine: its model, its KV cache, its scheduler."""

    model: str
    """Model to serve: a local directory, a Hugging Face id, or a built-in one such as kvferry/tiny-python."""

    dtype: DType = "auto"
    """Data type of weights and KV; auto takes the checkpoint's own."""

    device: Device = "auto"
    """Where the model runs; auto takes a GPU when there is one."""

    tensor_parallel_size: int = field(default=1, metadata={"alias": "tp"})
    """Number of ranks that share the weights, the KV cache and the work of the model. Each is a process on this
    machine, with a GPU of its own where there are GPUs."""

    max_model_len: int | None = None
    """Longest prompt plus answer, in tokens. Default: the model's own limit."""

    block_size: int = 32
    """Tokens per KV block."""

    kv_cache_memory: str | None = None
    """Size of the KV cache on all ranks together, such as 512MiB or 2GiB. Default: a share of the free memory."""

    max_num_seqs: int = 128
    """Most sequences that run at the same time."""

    max_num_batched_tokens: int = 2048
    """Token budget of one step. A longer prefill is split into chunks."""

    max_waiting: int = 1024
    """Most requests that wait; further ones are answered with 429."""

    prefix_caching: bool = True
    """Keep the blocks of finished requests, and reuse them for prompts with the same prefix."""

    kv_events: str | None = None
    """Publish which blocks the prefix cache takes in and gives up, as vLLM does, at this ZeroMQ address:
    tcp://127.0.0.1:5557, or with port * for any free one, which routers learn by themselves. Whoever can connect reads
    the tokens of prompts. Needs kvferry[events]."""

    kv_events_replay: str | None = None
    """ZeroMQ address at which followers ask for events that they missed; when not given, a free port of the same
    host."""

    batch_invariant: bool = False
    """Make answers the same to the bit, whatever other requests run at the same time. The CPU kernels guarantee this at
    no cost. Where a model, a device or a missing compiler leaves matrix products to PyTorch, every token is computed by
    itself, which takes several times as long."""

    model_patch: tuple[str, ...] = ()
    """Patches of the loaded model, in this order: a name, or module:Class of your own package, with options behind a
    question mark (my_patch?min_rows=16). The model must compute the same with each. Default: cpu_kernels, kvferry's
    kernels for CPUs; name it too if you want to keep it beside others."""

    num_threads: int | None = None
    """CPU threads of the model on all ranks together. Default: OMP_NUM_THREADS, or all cores that this process may
    use."""

    seed: int | None = None
    """Seed for requests that have none. Default: a new random seed for each request."""

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
        require_known_patches(self.model_patch)
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ConfigError("--kv-events-replay needs --kv-events")
        if self.kv_events is not None:
            require_endpoint(self.kv_events, "--kv-events")
        if self.kv_events_replay is not None:
            require_endpoint(self.kv_events_replay, "--kv-events-replay")
        if self.kv_cache_memory is not None and parse_bytes(self.kv_cache_memory, "--kv-cache-memory") < 1:
            raise ConfigError("--kv-cache-memory must be more than 0 bytes")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs"
                f" ({self.max_num_seqs}), or a full batch of decodes does not fit a step"
            )
