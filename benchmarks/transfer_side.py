"""One end of a medium for `transfer.py`, in a process of its own and on a core of its own.

    serve MEDIUM   fills a region, prints how to reach it as a line of JSON, serves until stdin closes
    read MEDIUM    takes that line from stdin, reads scattered blocks, prints a line of JSON for each block size

Each 8-byte word of the served region is its own index, so that any block can be checked without a copy of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time

import numpy as np
import psutil

from transfer_media import MEDIA, Medium, Memory, Spans, make_memory


def main() -> None:
    """Serve or read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", choices=["serve", "read"])
    parser.add_argument("medium", choices=sorted(MEDIA))
    parser.add_argument("--memory", default="host", help="of this end: host, a GPU as cuda:0, or double")
    parser.add_argument("--core", type=int)
    parser.add_argument("--region", type=int, required=True, help="bytes")
    parser.add_argument("--total", type=int, default=0, help="bytes that each transfer moves")
    parser.add_argument("--blocks", type=int, nargs="*", default=[])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if options.core is not None:
        psutil.Process().cpu_affinity([options.core])
    memory = make_memory(options.memory, options.region)
    medium = MEDIA[options.medium]()
    if options.end == "serve":
        serve(medium, memory)
    else:
        read(options, medium, memory)
    memory.close()
    sys.stdout.flush()
    os._exit(0)  # some libraries leave threads behind that never end


def serve(medium: Medium, memory: Memory) -> None:
    """Until stdin closes."""
    memory.set(np.arange(memory.num_bytes // 8))
    print(json.dumps({"pid": os.getpid(), "segment": memory.name, **medium.serve(memory)}), flush=True)
    medium.wait()


def read(options: argparse.Namespace, medium: Medium, memory: Memory) -> None:
    """Every block size, `repeat` times after one that warms up."""
    where = json.loads(sys.stdin.readline())
    server = psutil.Process(where["pid"])
    medium.open(memory, where)
    for size in options.blocks:
        remote, local = scattered(options.total, options.region, size)
        prepared = medium.prepare(remote, local)
        medium.read(prepared)
        memory.set(np.zeros(memory.num_bytes // 8, np.int64))
        medium.read(prepared)
        if medium.scatters:
            require_right(memory, remote, local)
        seconds, cpu = [], []
        gc.disable()
        for _ in range(options.repeat):
            cpu_before, began = cpu_seconds(server), time.perf_counter()
            medium.read(prepared)
            seconds.append(time.perf_counter() - began)
            cpu.append(cpu_seconds(server) - cpu_before)
        gc.enable()
        print(json.dumps({"block": size, "seconds": seconds, "cpu_seconds": cpu}), flush=True)
    medium.close()


def scattered(total: int, region: int, size: int) -> tuple[Spans, Spans]:
    """Blocks in random places on both sides, no two neighbours joined: (remote, local) spans."""
    rng = np.random.default_rng(size)
    places = [rng.permutation(region // size)[: total // size] * size for _ in range(2)]
    remote, local = ([(offset, size) for offset in side.tolist()] for side in places)
    return remote, local


def require_right(memory: Memory, remote: Spans, local: Spans) -> None:
    """Each block has the words of its source."""
    for (source, length), (target, _) in zip(remote, local, strict=True):
        content = memory.get(target // 8, (target + length) // 8)
        expected = np.arange(source // 8, (source + length) // 8)
        assert (content == expected).all(), f"the block at {target} is not that at {source}"


def cpu_seconds(server: psutil.Process) -> float:
    """Of both ends so far."""
    times = server.cpu_times()
    return float(time.process_time() + times.user + times.system)


if __name__ == "__main__":
    main()
