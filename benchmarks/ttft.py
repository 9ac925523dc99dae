"""The cost of a hand-off before the first token, and the share of the transfer that the prefill hides.

A prefill and a decode instance, a core each, stand behind three routers: one hands off sequentially, one concurrently,
and one asks the prefill instance for the whole answer, as if it were plain. So all three run in the very same process:
two processes of one program differ by more than a hand-off costs. Routers and client run where there is room. The three
take turns; each prompt is new. Measured:

  TTFT          asked until the first token (the pair's first token is P's)
  prefill       the part of it that is computing the prompt; the rest is the way there and back, and the queue
  second token  asked until the second, which needs all KV at D
  transfer      from when D may read until it has all, and how much of that came after P was done

for every medium, sequential and concurrent. Prints medians, writes results/ttft.json and a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from load import Streamed, stream_completion
from models import SHAPE, make_bench_model
from report import RESULTS, earlier, print_machine, processor, save
from served import kvferry

Figures = dict[str, float]
Samples = dict[str, list[float]]
NUM_LAYERS = SHAPE["num_hidden_layers"]


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--media", nargs="+", default=["shm", "tcp"], help="transports: shm tcp nixl mooncake gloo")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8000], help="tokens of a prompt")
    parser.add_argument("--repeat", type=int, default=7, help="prompts of 2,048 tokens; more of shorter ones")
    parser.add_argument("--chunk", type=int, default=2048, help="--max-num-batched-tokens of all instances")
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> Streamed:
    """One prompt, two tokens."""
    answer = await stream_completion(session, url, "bench", prompt, 2, return_timeline=True)
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


async def alternate(urls: dict[str, str], lengths: list[int], repeat: int, seed: str) -> dict[str, dict[str, Figures]]:
    """Medians by form and prompt length; `urls` are by form, one of them "plain"."""
    rng = random.Random(seed)
    forms = [name for name in urls if name != "plain"]
    seen: dict[str, dict[int, Samples]] = {name: defaultdict(lambda: defaultdict(list)) for name in forms}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for length in lengths:
            runs = min(4 * repeat, max(3, repeat * 2048 // length))
            for run in range(runs + 1):
                answers = {}
                for name in rng.sample(sorted(urls), len(urls)):
                    prompt = [rng.randrange(5, SHAPE["vocab_size"]) for _ in range(length)]
                    answers[name] = await ask(session, urls[name], prompt)
                for name in forms if run else ():
                    note(seen[name][length], {"plain": answers["plain"], "pair": answers[name]})
    return {name: {str(length): summary(seconds) for length, seconds in seen[name].items()} for name in forms}


def note(seen: Samples, answers: dict[str, Streamed]) -> None:
    """One pair of answers."""
    for name, answer in answers.items():
        seen[f"{name}_ttft"].append(answer.ttft)
        seen[f"{name}_prefill"].append(answer.timeline["prefill_done"] - answer.timeline["prefill_started"])
        seen[f"{name}_second"].append(answer.token_times[1] - answer.sent_at)
    stamps = answers["pair"].timeline
    seen["transfer"].append(stamps["transfer_done"] - stamps["transfer_started"])
    seen["exposed"].append(max(0.0, stamps["transfer_done"] - stamps["prefill_done"]))


def summary(seen: Samples) -> Figures:
    """Medians in milliseconds; differences are of pairs, since the machine drifts."""

    def added(name: str) -> float:
        paired = zip(seen[f"pair_{name}"], seen[f"plain_{name}"], strict=True)
        return statistics.median(pair - plain for pair, plain in paired) * 1e3

    figures = {f"{name}_ms": statistics.median(values) * 1e3 for name, values in seen.items()}
    figures["added_ms"], figures["added_prefill_ms"] = added("ttft"), added("prefill")
    figures["added_percent"] = 100 * figures["added_ms"] / figures["plain_ttft_ms"]
    figures["runs"] = len(seen["exposed"])
    return figures


def show(label: str, figures: dict[str, Figures]) -> None:
    """One line a prompt length."""
    for length, row in figures.items():
        print(
            f"{label:18s} {length:>5s} tokens  TTFT {row['pair_ttft_ms']:8.1f} ms, plain {row['plain_ttft_ms']:8.1f},"
            f" added {row['added_ms']:6.1f} ms ({row['added_percent']:5.2f} %; to the prefill"
            f" {row['added_prefill_ms']:6.1f} ms)  second token"
            f" {row['pair_second_ms']:8.1f}, plain {row['plain_second_ms']:8.1f}  transfer {row['transfer_ms']:7.1f},"
            f" exposed {row['exposed_ms']:6.1f}",
            flush=True,
        )


@contextmanager
def ends(model: str, medium: str, cores: list[int], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """P, D and the three routers."""
    transfer = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": medium}}
    flags = ["--served-model-name", "bench", "--dtype", options.dtype, "--kv-cache-memory", "1GiB", "--port", "0"]
    flags += ["--max-num-batched-tokens", str(options.chunk), "--kv-transfer-config", json.dumps(transfer)]
    with ExitStack() as stack:
        prefill = stack.enter_context(kvferry("prefill", model, *flags, cores=cores[:1]))
        decode = stack.enter_context(kvferry("decode", model, *flags, cores=cores[-1:]))

        def router(*flags: str) -> str:
            return stack.enter_context(kvferry("router", *flags, "--port", "0"))

        pair = ["--disaggregate-from", "0", "--prefill-url", prefill, "--decode-url", decode, "--hand-off"]
        yield {
            "plain": router("--decode-url", prefill),
            "sequential": router(*pair, "sequential"),
            "concurrent": router(*pair, "concurrent"),
        }


def main() -> None:
    """All media, both forms."""
    options = parse()
    print_machine()
    cores = sorted(os.sched_getaffinity(0))[:2]
    results: dict[str, Any] = earlier("ttft", {})  # media that are not measured now
    with tempfile.TemporaryDirectory() as folder:
        longest = max(options.prompts) + 8
        model = make_bench_model(Path(folder), max_position_embeddings=max(longest, 4096))
        for medium in options.media:
            with ends(model, medium, cores, options) as urls:
                measured = asyncio.run(alternate(urls, options.prompts, options.repeat, medium))
            for form, figures in measured.items():
                results[f"{medium}, {form}"] = figures
                show(f"{medium}, {form}", figures)
    settings = {"model": SHAPE, **vars(options)}
    path = save("ttft", settings, results)
    picture = RESULTS / f"ttft.{processor()}.png"
    plot(results, picture)
    print(f"wrote {path} and {picture}")


def plot(results: dict[str, Any], path: Path) -> None:
    """Transfer time a layer, in all and as far as the prefill did not hide it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9.5, 4.5))
    for label, figures in results.items():
        lengths = [int(length) for length in figures]
        color = axes.plot(
            lengths, [row["exposed_ms"] / NUM_LAYERS for row in figures.values()], marker="o", label=f"{label}: exposed"
        )[0].get_color()
        totals = [row["transfer_ms"] / NUM_LAYERS for row in figures.values()]
        axes.plot(lengths, totals, linestyle=":", color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("ms per layer (dotted: from first to last byte)")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the lines, which are everywhere
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
