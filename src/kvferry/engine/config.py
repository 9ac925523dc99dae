"""Settings of one engine. Frozen: values found at run time (block count, chosen dtype) are state, kept elsewhere.

The command line's flags, the TOML table `[engine]` and the environment are generated from this class: a field's
docstring is its flag's help.
"""

from __future__ import annotations

from typing import Annotated, Literal

from kvferry.core.errors import ConfigError
from kvferry.core.settings.addresses import parse_address
from kvferry.core.settings.bounds import Count, Seconds, Seed
from kvferry.core.settings.model import COMMON, Settings, alias, heading
from kvferry.core.settings.units import parse_bytes
from kvferry.engine.overrides import parse_sampling, parse_template_kwargs
from kvferry.engine.parser_names import require_known_parser
from kvferry.engine.patch_names import require_known_patches
from kvferry.engine.scheduling.speculation import SpeculativeConfig
from kvferry.kv_events.sockets import require_endpoint
from kvferry.store.eviction.table import eviction_class

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]

_MAX_THREADS = 1024
"""OpenMP ends the process if it cannot start as many threads as requested."""


class EngineConfig(Settings, frozen=True, kw_only=True):
    """One engine: its model, its KV cache, its scheduler."""

    model: str
    """Model to serve: a local directory, a Hugging Face id, or a built-in one such as kvferry/tiny-python."""

    dtype: Annotated[DType, heading("kvferry's engine: model")] = "auto"
    """Data type of weights and KV; auto uses the checkpoint's own."""

    device: Annotated[Device, COMMON] = "auto"
    """Where the model runs; auto uses a GPU if there is one."""

    tensor_parallel_size: Annotated[Count, alias("tp"), COMMON] = 1
    """Number of ranks that share the weights, the KV cache and the work of the model. Each is a process on this
    machine (unless --ranks-at is set), with a GPU of its own if there are GPUs."""

    ranks_at: str | None = None
    """HOST:PORT of this machine at which the other ranks connect, each of them started by `kvferry rank HOST:PORT`, on
    any machine and with the same KVFERRY_AUTH_TOKEN. The model must have the same path there. Traffic between
    ranks is not encrypted. Default: this process starts them itself, on this machine."""

    num_threads: Count | None = None
    """CPU threads of the model on all ranks together. Default: OMP_NUM_THREADS, or all cores that this process may
    use, or what its container's CPU limit allows."""

    max_model_len: Annotated[Count | None, COMMON] = None
    """Longest prompt plus answer, in tokens. Default: the model's own limit."""

    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""

    model_patch: tuple[str, ...] = ()
    """Patches of the loaded model, in this order: a name, or module:Class of your own package, with options after a
    question mark (my_patch?min_rows=16). The model must compute the same with each. Default: cpu_kernels, kvferry's
    kernels for CPUs; name it too if you want to keep it beside others."""

    tool_call_parser: str | None = None
    """Format of the model's tool calls: hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, deepseek_v31, kimi_k2,
    glm, gemma4 or gpt_oss, a parser of your own package (a name or module:Class), or none. Default: the checkpoint's
    response_template, else what its chat template shows."""

    reasoning_parser: str | None = None
    """Format of the model's reasoning: think, mistral, gemma4 or gpt_oss, a parser of your own package, or none.
    Default: as for tool calls."""

    chat_template: str | None = None
    """Chat template in place of the model's own: a file with it, or the template itself. Give all instances the
    same."""

    default_chat_template_kwargs: str | None = None
    """Variables of the chat template, as a JSON object such as {"enable_thinking": false}, for requests that do not set
    them in chat_template_kwargs."""

    override_generation_config: str | None = None
    """Sampling parameters for requests without their own, in place of those in the model's generation_config.json, as a
    JSON object: temperature, top_p, top_k, min_p, repetition_penalty. Give all instances the same."""

    batch_invariant: bool = False
    """Make answers bit-identical, whatever other requests run at the same time. The CPU kernels guarantee this at no
    cost. If a model, a device or a missing compiler leaves matrix products to PyTorch, every token is computed by
    itself, which takes several times as long."""

    mix_kernels: bool = False
    """In bfloat16 and float16, hand off to and share stores with instances whose kernels round otherwise: another kind
    of processor, a missing compiler, another number of ranks. Their answers may then differ from both instances' own.
    Set it on all instances. In float32, kernels may always be mixed."""

    seed: Seed | None = None
    """Seed for requests that have none. Default: a new random seed for each request."""

    block_size: Annotated[Count, heading("kvferry's engine: KV cache")] = 32
    """Tokens per KV block."""

    kv_cache_memory: Annotated[str | None, COMMON] = None
    """Size of the KV cache on all ranks together, such as 512MiB or 2GiB. Default: a share of the free memory."""

    prefix_caching: bool = True
    """Keep the blocks of finished requests, and reuse them for prompts with the same prefix."""

    prefix_cache_eviction: str = "lru"
    """Eviction policy of the prefix cache: lru, or any other eviction policy of the stores, such as reuse, which learns
    what kind of blocks are reused. Within one prompt, lru and reuse evict the last block first; the others begin with
    the first, without which the rest cannot be found."""

    kv_events: str | None = None
    """Publish the blocks that the prefix cache stores and evicts, as vLLM does, at this ZeroMQ address:
    tcp://127.0.0.1:5557, or with port * for any free one, which routers discover. Any client that can connect can read
    the tokens of prompts. Needs kvferry[events]."""

    kv_events_replay: str | None = None
    """ZeroMQ address at which followers request events that they missed. Default: a free port of the same host."""

    max_num_seqs: Annotated[Count, heading("kvferry's engine: scheduler")] = 128
    """Max number of sequences that run at the same time."""

    max_num_batched_tokens: Count = 2048
    """Token budget of one step. A longer prefill is split into chunks."""

    itl_target_s: Seconds | None = None
    """Target of the time between two tokens of an answer, in seconds: while answers run, a step computes as many tokens
    of prompts as fit it, by the speed that is measured, and 16 at least. Default: --max-num-batched-tokens alone
    bounds a step; in a fleet with [scale], decode instances have its `itl`."""

    speculative_config: str | None = None
    """Speculative decoding by prompt lookup, as JSON with vLLM's names: {"method": "ngram", "num_speculative_tokens":
    4}, and prompt_lookup_min (2) and prompt_lookup_max (5). Answers stay the same; steps compute drafted tokens as
    well, where by the measured speed this pays. Default: off."""

    max_waiting: Count = 1024
    """Max number of waiting requests; further ones are answered with 429."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_threads is not None and self.num_threads > _MAX_THREADS:
            raise ConfigError(f"--num-threads must be at most {_MAX_THREADS}, got {self.num_threads}")
        if self.ranks_at is not None:
            parse_address(self.ranks_at, "--ranks-at")
            if self.tensor_parallel_size == 1:
                raise ConfigError("--ranks-at needs --tensor-parallel-size of at least 2")
        require_known_patches(self.model_patch)
        require_known_parser("tools", self.tool_call_parser)
        require_known_parser("reasoning", self.reasoning_parser)
        if self.default_chat_template_kwargs is not None:
            parse_template_kwargs(self.default_chat_template_kwargs)
        if self.override_generation_config is not None:
            parse_sampling(self.override_generation_config)
        if self.speculative_config is not None:
            SpeculativeConfig.parse(self.speculative_config)
        eviction_class(self.prefix_cache_eviction)
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
