"""Compression ratio and speed of each codec of KV, and its effect on answers.

    python benchmarks/kv_codecs.py

KV of the built-in model, computed from files of the standard library that its training never saw. The first half of
each text is computed, its KV is encoded and decoded block by block, and the model goes on from there: perplexity of
the other half, and how long its greedy answer stays the one that it gives from untouched KV.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvferry.models
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.store.codecs.base import Codec
from kvferry.store.codecs.table import BUILTIN, make_codec
from report import print_machine, save

MODEL = Path(kvferry.models.__file__).parent / "tiny_python"
BLOCK_TOKENS = 16
NUM_ANSWER_TOKENS = 64


def main() -> None:
    """Run all codecs in both number formats, print tables, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=12, help="texts, each from another file")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a text, half of them prompt")
    arguments = parser.parse_args()
    print_machine()
    results = {}
    for dtype in ("bfloat16", "float32"):
        figures = results[dtype] = MeasuredTraffic(dtype, arguments.tokens).run(arguments.texts)
        print(f"\n{dtype}\n{_table(figures)}", flush=True)
    settings = {"texts": arguments.texts, "tokens": arguments.tokens, "block_tokens": BLOCK_TOKENS}
    print(save("kv_codecs", settings, results))


class MeasuredTraffic:
    """One number format: the model, and its KV layout."""

    def __init__(self, dtype: str, num_tokens: int) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
        self._model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype)).eval()
        config = self._model.config
        layer = LayerLayout(config.num_key_value_heads, config.head_dim, config.head_dim)
        layers = (layer,) * config.num_hidden_layers
        self._layout = KVLayout(model_fingerprint="m", dtype=dtype, block_size=BLOCK_TOKENS, layers=layers)
        self._num_tokens = num_tokens

    @torch.inference_mode()
    def run(self, num_texts: int) -> dict[str, dict[str, float]]:
        """Figures by codec."""
        sums = {
            name: dict.fromkeys(("raw", "encoded", "encode_s", "decode_s", "loss", "same"), 0.0) for name in BUILTIN
        }
        codecs = {name: make_codec(name, self._layout) for name in BUILTIN}
        texts = [tokens for tokens, _ in zip(self._texts(), range(num_texts), strict=False)]
        for tokens in texts:
            half = self._num_tokens // 2
            cache = self._model(tokens[:, :half], use_cache=True).past_key_values
            first = tokens[:, half : half + 1]
            exact = self._answer(copy.deepcopy(cache), first)
            for name, codec in codecs.items():
                decoded = self._through(codec, copy.deepcopy(cache), sums[name])
                answer = self._answer(copy.deepcopy(decoded), first)
                sums[name]["same"] += _same(exact, answer) / NUM_ANSWER_TOKENS
                sums[name]["loss"] += self._loss(decoded, tokens[:, half:])
        return {name: _figures(figures, len(texts)) for name, figures in sums.items()}

    def _texts(self) -> Iterator[Any]:
        """Tokens of files that were held out from training: those whose path's hash says so."""
        library = Path(sysconfig.get_paths()["stdlib"])
        for path in sorted(library.rglob("*.py")):
            name = path.relative_to(library).as_posix()
            if "site-packages" in name or int(hashlib.sha256(name.encode()).hexdigest(), 16) % 50:
                continue
            tokens = self._tokenizer(path.read_text(encoding="utf-8", errors="ignore"), return_tensors="pt").input_ids
            if tokens.shape[1] >= self._num_tokens:
                yield tokens[:, : self._num_tokens]

    def _through(self, codec: Codec, cache: Any, sums: dict[str, float]) -> Any:
        """The cache, every block of it encoded and decoded. Keys and values are [1, heads, tokens, dim]."""
        for index, layer in enumerate(cache.layers):
            for start in range(0, layer.keys.shape[2], BLOCK_TOKENS):
                block = slice(start, start + BLOCK_TOKENS)
                keys, values = layer.keys[0, :, block], layer.values[0, :, block]
                span = torch.cat((keys.flatten(1), values.flatten(1)), dim=1).contiguous()
                keys_, values_ = self._decoded(codec, span, index, sums).chunk(2, dim=1)
                layer.keys[0, :, block], layer.values[0, :, block] = keys_.view_as(keys), values_.view_as(values)
        return cache

    def _decoded(self, codec: Codec, span: torch.Tensor, layer: int, sums: dict[str, float]) -> torch.Tensor:
        raw = span.view(torch.uint8).numpy().data.cast("B")
        into = torch.empty_like(span)
        times = [time.thread_time()]
        encoded = memoryview(codec.encode(raw, layer))
        times.append(time.thread_time())
        codec.decode(encoded, layer, into.view(torch.uint8).numpy().data.cast("B"))
        times.append(time.thread_time())
        sums["raw"] += len(raw)
        sums["encoded"] += len(encoded)
        sums["encode_s"] += times[1] - times[0]
        sums["decode_s"] += times[2] - times[1]
        return into

    def _loss(self, cache: Any, tokens: Any) -> float:
        """Mean negative log-likelihood of a text's second half, whose first token is given."""
        logits = self._model(tokens, past_key_values=cache).logits[0, :-1].float()
        return float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))

    def _answer(self, cache: Any, token: Any) -> list[int]:
        """Greedy tokens."""
        answer: list[int] = []
        while len(answer) < NUM_ANSWER_TOKENS:
            token = self._model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            answer.append(int(token))
        return answer


def _same(exact: list[int], answer: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(exact, answer, strict=True))
    return next((index for index, (first, other) in pairs if first != other), len(exact))


def _figures(sums: dict[str, float], num_texts: int) -> dict[str, float]:
    return {
        "ratio": sums["raw"] / sums["encoded"],
        "encode_mb_per_s": sums["raw"] / sums["encode_s"] / 1e6,
        "decode_mb_per_s": sums["raw"] / sums["decode_s"] / 1e6,
        "perplexity": math.exp(sums["loss"] / num_texts),
        "greedy_same": sums["same"] / num_texts,
    }


def _table(results: dict[str, dict[str, float]]) -> str:
    rows = [
        "| codec | ratio | encode, MB/s | decode, MB/s | perplexity | greedy tokens alike |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        speeds = f"{row['encode_mb_per_s']:.0f} | {row['decode_mb_per_s']:.0f}"
        rows.append(f"| {name} | {row['ratio']:.2f} | {speeds} | {row['perplexity']:.4f} | {row['greedy_same']:.1%} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
