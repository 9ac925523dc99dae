"""Speed of KV from one process to another: every transport beside a plain copy by the same means.

Two processes on one machine, one core each. Blocks of several sizes in random places on both sides, so many that
they fill no cache. The media take turns in rounds, and contents are verified. `memcpy`, a loop in C between the two
processes' shared memory, is the limit. `make gpu` measures the same between GPUs' memories.

Prints a table and writes results/transfer.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import earlier, print_machine, save
from transfer_media import IN_HOST_MEMORY

SIDE = Path(__file__).with_name("transfer_side.py")
MIB = 2**20
PAIRS = [
    ("kvferry shm", "memcpy"),
    ("kvferry tcp", "socket"),
    ("kvferry tcp, checksums", "kvferry tcp"),
    ("kvferry tcp, TLS", "kvferry tcp"),
    ("kvferry tcp, TLS", "kvferry tcp, checksums"),
    ("kvferry tcp, 2 streams", "socket, 2 streams"),
    ("kvferry nixl", "NIXL's API"),
    ("kvferry mooncake", "Mooncake's API"),
    ("kvferry gloo", "gloo"),
]


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, nargs="*", default=[64, 256], help="MiB that each transfer moves")
    parser.add_argument("--blocks", type=int, nargs="*", default=[16, 64, 256, 1024], help="KiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="transfers in each round")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of the serving and of the reading process")
    parser.add_argument("--media", nargs="*", choices=IN_HOST_MEMORY, default=list(IN_HOST_MEMORY), metavar="MEDIUM")
    options = parser.parse_args()
    options.memories, options.environment, options.timeout_s = ("host", "host"), {}, 300.0
    return options


@dataclass(frozen=True)
class Done:
    """A round of one medium: what the reading process printed for each block size, and the log of both."""

    lines: list[dict[str, Any]]
    log: str

    @property
    def reason(self) -> str:
        """Why there are no lines, as far as the log tells."""
        errors = [line for line in self.log.splitlines() if re.search(r"Error|error|Exception", line)]
        return (errors or self.log.splitlines() or ["no answer in time"])[-1].strip()[-300:]


def run(medium: str, total: int, options: argparse.Namespace) -> Done:
    """One round of one medium. `total`: MiB. Of the options: `blocks` (KiB), `repeat`, `cores` or None, `memories` of
    the serving and of the reading process, `environment` of both, and `timeout_s`."""
    region = 2 * total * MIB
    cores = options.cores or (None, None)

    def start(end: str, index: int, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(SIDE), end, medium, f"--region={region}", *more]
        command += [f"--memory={options.memories[index]}"]
        command += [] if cores[index] is None else [f"--core={cores[index]}"]
        environment = {"OMP_NUM_THREADS": "1", "UCX_LOG_LEVEL": "error", **os.environ, **options.environment}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)

    blocks = [str(size * 1024) for size in options.blocks]
    with tempfile.TemporaryFile("w+") as log, start("serve", 0) as server:
        limit = threading.Timer(options.timeout_s, server.kill)  # for a library that hangs
        limit.start()
        assert server.stdout is not None
        where = next((line for line in server.stdout if line.startswith("{")), "")  # some libraries print their log
        limit.cancel()
        more = ["--total", str(total * MIB), "--repeat", str(options.repeat), "--blocks", *blocks]
        with start("read", 1, *more) as reader:
            try:
                lines, _ = reader.communicate(where, timeout=options.timeout_s)
            except subprocess.TimeoutExpired:
                log.write(f"\nError: not done after {options.timeout_s:g} s\n")
                reader.kill()
                lines, _ = reader.communicate()  # of the block sizes that were done
            finally:
                reader.kill()
        try:
            server.communicate("", timeout=30)
        except subprocess.TimeoutExpired:
            log.write("\nError: the serving process does not end\n")
        finally:
            server.kill()
        log.seek(0)
        text = log.read()
    printed = lines.splitlines()
    text += "".join(f"{line}\n" for line in printed if not line.startswith("{"))  # UCX's log
    return Done([json.loads(line) for line in printed if line.startswith("{")], text)


def main() -> None:
    """All media in turns, round after round."""
    options = parse()
    print_machine()
    print(json.dumps(vars(options)))
    seconds: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    cpu: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for total in options.total:
            for medium in options.media:
                print(f"\rround {number + 1} of {options.rounds}: {total} MiB, {medium:24s}", end="", file=sys.stderr)
                done = run(medium, total, options)
                if not done.lines:
                    print(f"\n{medium}: left out of this round: {done.reason}", file=sys.stderr)
                for line in done.lines:
                    seconds[total, line["block"], medium] += line["seconds"]
                    cpu[total, line["block"], medium] += line["cpu_seconds"]
    print(file=sys.stderr)
    results = [
        {
            "total_mib": total,
            "block_kib": block // 1024,
            "medium": medium,
            "num_transfers": len(times),
            "gb_per_s": round(total * MIB / statistics.median(times) / 1e9, 2),
            "cpu_s_per_gb": round(statistics.median(cpu[total, block, medium]) / (total * MIB / 1e9), 3),
        }
        for (total, block, medium), times in seconds.items()
    ]
    print_table(results, options)
    print(f"wrote {save('transfer', vars(options), with_earlier('transfer', results))}")


def with_earlier(name: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These, and the earlier ones of other cells: media that are not compared may be measured one after the other."""

    def cell(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["total_mib"], row["block_kib"], row["medium"]

    measured = set(map(cell, results))
    return [*(row for row in earlier(name, []) if cell(row) not in measured), *results]


def print_table(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """GB/s, and CPU seconds of both ends for each GB; a column for each total and block size."""
    cells = {(row["total_mib"], row["block_kib"], row["medium"]): row for row in results}
    columns = [(total, block) for total in options.total for block in options.blocks]
    heading = "".join(f"{f'{total}M/{block}K':>16s}" for total, block in columns)
    print(f"{'GB/s (CPU s per GB)':24s}{heading}")
    for medium in options.media:
        row_cells = [cells.get((*column, medium)) for column in columns]
        texts = [f"{row['gb_per_s']:.2f} ({row['cpu_s_per_gb']:.2f})" if row else "-" for row in row_cells]
        print(f"{medium:24s}" + "".join(f"{text:>16s}" for text in texts))
    print("\nratio")
    for ours, theirs in PAIRS:
        rows = [(cells.get((*column, ours)), cells.get((*column, theirs))) for column in columns]
        if any(mine and other for mine, other in rows):
            ratios = [f"{mine['gb_per_s'] / other['gb_per_s']:.2f}" if mine and other else "-" for mine, other in rows]
            print(f"{f'{ours} / {theirs}':40s}" + "".join(f"{text:>12s}" for text in ratios))


if __name__ == "__main__":
    main()
