"""Speed of KV from one vLLM into another on one machine, by transport, beside a plain copy of as many bytes: in
host memory or, where there is a GPU, in its memory.

    .venv-vllm/bin/python benchmarks/vllm_transfer.py [--tokens 2000] [--repeat 5]

Both vLLMs are real and unmodified, each in a process of its own; the model is small and random, with much KV a token.
Reading is timed by the consumer, from the first block to the producer's acknowledgement.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
KV_BYTES = 1 << 30
WARM_UP = 3
"""Hand-offs that do not count: into memory that nobody has touched yet."""
TRANSPORTS: dict[str, dict[str, Any]] = {
    "shared memory": {"transport": "shm"},
    "TCP, from vLLM's own memory": {"transport": "tcp", "shared_memory": False},
}
ON_GPU: dict[str, dict[str, Any]] = {"CUDA IPC": {"transport": "cuda_ipc"}, "NIXL": {"transport": "nixl"}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt")
    parser.add_argument("--repeat", type=int, default=5, help="hand-offs; the median counts")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from torch.cuda import is_available

    from kvferry.models.random_model import make_random_model

    on_gpu = is_available()
    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(Path(folder) / "model", "llama", **MODEL)
        num_bytes = 0
        for name, extra in (ON_GPU if on_gpu else TRANSPORTS).items():
            num_bytes, rates = measure(model, extra, options.tokens, options.repeat)
            report(name, rates, f"({num_bytes / 2**20:.0f} MiB a hand-off)")
    copy = device_copy_rate if on_gpu else copy_rate
    report("one copy", [copy(num_bytes) for _ in range(options.repeat)])


def report(what: str, rates: list[float], more: str = "") -> None:
    """The median."""
    print(f"{what:30} {statistics.median(rates):6.2f} GB/s  {more}", flush=True)


def measure(model: Path, extra: dict[str, Any], num_tokens: int, repeat: int) -> tuple[int, list[float]]:
    """Bytes of a hand-off, and GB/s of each."""
    context = multiprocessing.get_context("spawn")
    (producer, theirs), (consumer, others) = context.Pipe(), context.Pipe()
    ends = [(theirs, "kv_producer"), (others, "kv_consumer")]
    processes = [context.Process(target=run_vllm, args=(end, str(model), role, extra)) for end, role in ends]
    for process in processes:
        process.start()
    producer.recv(), consumer.recv()
    figures = [(0.0, 0.0)]
    for index in range(WARM_UP + repeat):
        prompt = [(index * 7 + position * 37) % 4000 + 3 for position in range(num_tokens)]
        producer.send((prompt, {"do_remote_decode": True, "transfer_id": f"t{index}"}))
        ticket, _ = producer.recv()
        consumer.send((prompt, ticket))
        figures.append(consumer.recv()[1])
    for end, process in ((producer, processes[0]), (consumer, processes[1])):
        end.send(None)
        process.join()
    steps = [(later[0] - sooner[0], later[1] - sooner[1]) for sooner, later in pairwise(figures)]
    return int(steps[0][0]), [num_bytes / seconds / 1e9 for num_bytes, seconds in steps[-repeat:]]


def run_vllm(connection: Any, model: str, role: str, extra: dict[str, Any]) -> None:
    """One vLLM: prompts come, and the ticket goes with what was taken so far (bytes, s)."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.platforms import current_platform

    transfer = KVTransferConfig(
        kv_connector="KvferryP2pConnector", kv_role=role, kv_connector_extra_config={**extra, "kv_buffer_size": 4e9}
    )
    engine = LLM(
        model=model,
        dtype="float32" if current_platform.is_cpu() else "bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=KV_BYTES,
        gpu_memory_utilization=0.2,
        max_model_len=4096,
        enable_prefix_caching=False,
        kv_transfer_config=transfer,
    )
    connection.send(None)
    core = engine.llm_engine.engine_core.engine_core
    while (request := receive(connection, engine, core)) is not None:
        prompt, params = request
        sampling = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": params})
        [output] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        figures = get_kv_transfer_group()._worker.side.statistics()
        taken = sum(value for name, value in figures.items() if name.startswith("taken_bytes"))
        connection.send((output.kv_transfer_params, (taken, figures.get("taken_seconds", 0.0))))
    core.shutdown()


def receive(connection: Any, engine: Any, core: Any) -> Any:
    """The next request; meanwhile vLLM steps, so that leases end."""
    while not connection.poll(0.001):
        if core.scheduler.has_requests():
            engine.llm_engine.step()
    return connection.recv()


def copy_rate(num_bytes: int) -> float:
    """GB/s of a copy within this process, into memory that has been written to before."""
    source, target = ctypes.create_string_buffer(num_bytes), ctypes.create_string_buffer(num_bytes)
    ctypes.memmove(target, source, num_bytes)
    start = time.perf_counter()
    ctypes.memmove(target, source, num_bytes)
    return num_bytes / (time.perf_counter() - start) / 1e9


def device_copy_rate(num_bytes: int) -> float:
    """As `copy_rate`, on the GPU."""
    import torch

    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return num_bytes / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    main()
