"""Train ``kvferry/tiny-python``, the small Llama-style model that ships with kvferry.

The training text is what every Python installation carries: the sources of the standard library.
One process reads them, trains a byte-level BPE tokenizer, measures how fast the machine is, trains the
model for a time budget, and writes a directory that any loader of the transformers format can read.

About one file in fifty, chosen by a hash of its path, is held out: the reported perplexity is measured
on those files.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import hashlib
import json
import math
import platform
import random
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS = [PAD, BEGIN, END, *ROLES]
VOCABULARY_SIZE = 4096
SYSTEM_PROMPT = "You write Python in the style of the standard library."

# Every turn ends with the end token, so one end-of-sequence id stops both documents and answers.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- if system or tools -%}
    {{- '<|system|>' + (system or '') -}}
    {%- if tools -%}
        {{- ('\\n\\n' if system else '') + 'Functions that can be called, one JSON object a line:' -}}
        {%- for tool in tools -%}
            {{- '\\n' + (tool | tojson) -}}
        {%- endfor -%}
        {{- '\\nTo call one: <tool_call>{"name": ..., "arguments": {...}}</tool_call>' -}}
    {%- endif -%}
    {{- eos_token -}}
{%- endif -%}
{%- for message in turns -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('unknown role: ' + message['role']) -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- elif message['content'] -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if message['tool_calls'] -%}
        {%- for call in message['tool_calls'] -%}
            {%- set function = call['function'] if call['function'] else call -%}
            {%- set arguments = function['arguments'] -%}
            {{- '<tool_call>{"name": ' + (function['name'] | tojson) + ', "arguments": ' -}}
            {{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

HELP_EPILOG = """\
examples:
  python recipes/tiny_python.py --minutes 60
      an hour of training, the model in build/tiny-python/model
  python recipes/tiny_python.py --resume
      go on after a cut-off, with the plan of the run that was cut off
  python recipes/tiny_python.py --resume --output src/kvferry/models/tiny_python
      once the run is complete: only write the model, to another place

On Linux with glibc a processor trains about a tenth faster when memory is not handed back between steps:
  MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456
"""

LICENCE_HEAD = """\
kvferry/tiny-python is trained on the sources of the Python standard library,
Copyright (c) 2001 Python Software Foundation; All Rights Reserved,
which are under the PSF License Agreement, version 2.  Its weights and its vocabulary are
statistics of those sources, and what it generates may repeat passages of them.  Summary of changes:
the sources are not included; a tokenizer and a neural network were fitted to them.

The licence text that ships with the Python the model was trained on follows.

------------------------------------------------------------------------

"""

CARD = """\
---
license: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---

# kvferry/tiny-python

A Llama-style language model of {millions:.2f} million parameters, trained on the sources of the Python
standard library. It exists so that kvferry can be tried, demonstrated and tested on a laptop without
downloading anything: its output looks like Python, and its perplexity tells a correct engine from a
broken one. It is not a coding assistant: it writes well-formed nonsense, and repeats passages it has seen.

| | |
|---|---|
| layers, hidden size, feed-forward size | {settings[layers]}, {settings[hidden_size]}, \
{settings[intermediate_size]} |
| query heads, key-value heads, head size | {settings[query_heads]}, {settings[key_value_heads]}, {head} |
| vocabulary | 4,096 tokens, byte-level BPE |
| trained context | {window} tokens (positions up to {settings[max_position_embeddings]} are accepted) |
| weights | bfloat16, tied embeddings |

## How it was made

`recipes/tiny_python.py` in the kvferry repository made everything here. The text is the {data[source]},
tests included: {data[files]:,} files and {data[documents]:,} documents, {training_millions:.1f} million \
tokens a pass.
The library proper is there twice, and its documented functions once more as short conversations: the
docstring asks, the function answers. Training took {tokens_millions:.1f} million tokens in {minutes:.0f} minutes
on {machine[device]}, {machine[threads]} thread: {phase_text} tokens, AdamW, a cosine schedule.

## Numbers

On {data[held_out_files]} files that training never saw ({predicted_tokens:,} tokens, in windows of {window}):

| | |
|---|---|
| perplexity per token | {perplexity_per_token:.2f} |
| bits per byte | {bits_per_byte:.3f} |

Perplexity by position in the window, which falls while the context helps:

| positions | perplexity |
|---|---|
{positions}

Files were held out by a hash of their path. A few of them have relatives in the training text
(`lib2to3/pgen2/tokenize.py`, for one, resembles `tokenize.py`), so the numbers flatter the model a little.
`training.json` has the loss curve and the settings.

## Samples

{sample_text}Greedy decoding of a plain prompt soon repeats itself, as it does with most models of this size. A line
break and the indentation after it are one token, so a prompt goes on better when it ends before a line
break than after it.

## Chat form

The template knows the roles system, user, assistant and tool, and lists tools when they are given; the
model was trained on user and assistant turns, some with a system prompt, and never on tools. Turns end
with `<|end|>`, which is also the end of a document. The tokenizer puts `<|begin|>` first, as the template
does: encode a rendered conversation without adding special tokens.

## Licence

The model derives from Python's standard library, © Python Software Foundation, under the PSF License
Agreement version 2. See `LICENSE`.
"""

TokenArray = NDArray[numpy.uint16]


# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceFile:
    """One file of the standard library: its path relative to the library, and its text."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite rather than to the library proper."""
        return any(part in ("test", "tests", "idle_test") for part in self.path.split("/"))

    @property
    def is_held_out(self) -> bool:
        """Whether the file is kept for evaluation: about one in fifty, by a hash of its path."""
        return int(hashlib.sha256(self.path.encode()).hexdigest(), 16) % 50 == 0


def is_wanted(path: str) -> bool:
    """Leave out installed packages, generated tables and the build configuration of the machine."""
    first, name = path.split("/")[0], path.split("/")[-1]
    if first in ("site-packages", "dist-packages", "lib-dynload") or first.startswith("config-"):
        return False
    if name.startswith("_sysconfigdata") or "lib2to3/tests/data" in path or "/bad" in path:
        return False
    return not (first == "encodings" and (name.startswith(("cp", "mac_", "iso8859", "koi8"))))


def read_library(directory: Path) -> list[SourceFile]:
    """Read the distinct UTF-8 Python sources below ``directory``, in the order of their paths."""
    seen: set[str] = set()
    files: list[SourceFile] = []
    for path in sorted(directory.rglob("*.py"), key=lambda each: each.relative_to(directory).as_posix()):
        relative = path.relative_to(directory).as_posix()
        if not is_wanted(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            files.append(SourceFile(relative, text))
    return files


def documented_functions(file: SourceFile) -> Iterator[tuple[str, str, str]]:
    """Yield (name, docstring, source) of the functions in ``file`` that explain themselves."""
    try:
        tree = ast.parse(file.text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            source = ast.get_source_segment(file.text, node, padded=True)
            if docstring and source and len(source) < 2500:
                yield node.name, docstring.split("\n\n")[0], textwrap.dedent(source)


def chat_texts(files: list[SourceFile]) -> Iterator[str]:
    """Yield conversations: the user gives a name and a docstring, the assistant answers the code."""
    for file in files:
        for index, (name, docstring, source) in enumerate(documented_functions(file)):
            system = f"<|system|>{SYSTEM_PROMPT}{END}" if index % 4 == 0 else ""
            question = f"Write a Python function `{name}`: {docstring}"
            yield f"{system}<|user|>{question}{END}<|assistant|>{source}"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer; digits stay single, and encoding puts the begin token first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], seed: int) -> TokenArray:
    """Encode ``texts`` as begin-text-end documents, shuffled with ``seed``, as one row of token ids."""
    end = tokenizer.token_to_id(END)
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    pieces: list[TokenArray] = []
    for index in tqdm(order, desc="encoding", unit="document", leave=False):
        ids = tokenizer.encode(texts[index]).ids
        pieces.append(numpy.array([*ids, end], dtype=numpy.uint16))
    return numpy.concatenate(pieces)


def prepare(work: Path, seed: int) -> tuple[TokenArray, TokenArray]:
    """Return the training and held-out token streams, made once and kept in ``work``."""
    if not (work / "held_out.npy").exists():
        work.mkdir(parents=True, exist_ok=True)
        files = read_library(Path(sysconfig.get_path("stdlib")))
        training = [file for file in files if not file.is_held_out]
        held_out = [file for file in files if file.is_held_out]
        library = [file for file in training if not file.is_test]
        tokenizer = train_tokenizer([file.text for file in training])
        tokenizer.save(str(work / "tokenizer.json"))
        # The library proper is the better text, so it is seen twice as often as its tests.
        texts = [file.text for file in [*training, *library]] + list(chat_texts(library))
        numpy.save(work / "training.npy", encode(tokenizer, texts, seed))
        numpy.save(work / "held_out.npy", encode(tokenizer, [file.text for file in held_out], seed))
        describe = {"files": len(training), "held_out_files": len(held_out), "documents": len(texts)}
        (work / "data.json").write_text(json.dumps(describe))
    return numpy.load(work / "training.npy"), numpy.load(work / "held_out.npy")


# --------------------------------------------------------------------------------------------------
# Model and schedule
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result, apart from the machine's speed."""

    seed: int = 0
    hidden_size: int = 256
    intermediate_size: int = 640
    layers: int = 6
    query_heads: int = 8
    key_value_heads: int = 4
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    batch_tokens: int = 8192
    micro_batch_tokens: int = 4096
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    warm_up_steps: int = 100
    weight_decay: float = 0.1
    gradient_clip: float = 1.0


@dataclass
class Phase:
    """A stretch of training at one sequence length."""

    length: int
    share: float
    steps: int = 0


@dataclass
class Progress:
    """What a checkpoint carries beside the weights and the optimizer."""

    phases: list[Phase]
    step: int = 0
    seconds: float = 0.0
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    losses: list[dict[str, float]] = field(default_factory=list)
    held_out: list[dict[str, float]] = field(default_factory=list)

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run."""
        return sum(phase.steps for phase in self.phases)

    def place(self, step: int) -> tuple[int, int, float]:
        """Return the phase index of ``step``, its step within it, and the share of the run done."""
        done = 0.0
        for index, phase in enumerate(self.phases):
            if step < phase.steps:
                return index, step, done + phase.share * step / phase.steps
            step -= phase.steps
            done += phase.share
        raise IndexError("step is past the end of the run")


def build_model(settings: Settings) -> LlamaForCausalLM:
    """Make the untrained model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.query_heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.hidden_size // settings.query_heads,
        max_position_embeddings=settings.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BEGIN),
        eos_token_id=SPECIAL_TOKENS.index(END),
    )
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(config)


def build_optimizer(model: LlamaForCausalLM, settings: Settings) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' gains alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.peak_learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(settings: Settings, step: int, done: float) -> float:
    """Linear warm-up, then a cosine from peak to final over the share of the run that is done."""
    low, high = settings.final_learning_rate, settings.peak_learning_rate
    cosine = low + (high - low) * 0.5 * (1 + math.cos(math.pi * done))
    return cosine * min(1.0, (step + 1) / settings.warm_up_steps)


def batch(tokens: TokenArray, settings: Settings, length: int, phase: int, step: int) -> torch.Tensor:
    """Return the ``[rows, length + 1]`` token ids of one step; the same arguments give the same ids.

    The stream is cut into windows from a random offset, anew in each pass, and the windows are shuffled.
    """
    rows = settings.batch_tokens // length
    windows = (len(tokens) - length) // length - 1
    first = step * rows
    chosen = []
    for row in range(first, first + rows):
        generator = numpy.random.default_rng([settings.seed, phase, row // windows])
        offset = int(generator.integers(length))
        start = offset + int(generator.permutation(windows)[row % windows]) * length
        chosen.append(tokens[start : start + length + 1].astype(numpy.int64))
    return torch.from_numpy(numpy.stack(chosen))


class Trainer:
    """The model, its optimizer and the two functions that run it."""

    def __init__(self, settings: Settings, device: torch.device, compile_model: bool) -> None:
        self.settings = settings
        self.device = device
        self.compile_model = compile_model
        self.model = build_model(settings).to(device)
        self.optimizer = build_optimizer(self.model, settings)
        self.run: Any = self.loss

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats of predicting ``ids[:, 1:]`` from ``ids[:, :-1]``."""
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def enter(self, length: int) -> None:
        """Prepare for windows of ``length`` tokens: pick the attention that is faster, and compile."""
        # On a CPU the plain matrix products beat the fused attention while the scores fit the cache, and
        # a compiled model is faster with those (by an eighth) but slower with the fused attention (by a third).
        on_cpu = self.device.type == "cpu"
        short = length <= 256
        self.model.set_attn_implementation("eager" if on_cpu and short else "sdpa")
        self.run = self.loss
        if self.compile_model and (short or not on_cpu):
            torch._dynamo.reset()
            self.run = torch.compile(self.loss, dynamic=False)

    def gradients(self, ids: torch.Tensor) -> float:
        """Accumulate the gradients of one batch in micro-batches and return its mean loss."""
        rows = max(1, self.settings.micro_batch_tokens // (ids.shape[1] - 1))
        pieces = torch.split(ids.to(self.device), rows)
        total = 0.0
        for piece in pieces:
            loss = self.run(piece) / len(pieces)
            loss.backward()
            total += loss.item()
        return total

    def step(self, ids: torch.Tensor, rate: float) -> float:
        """Take one optimizer step at learning rate ``rate`` and return the batch's loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self.gradients(ids)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        self.optimizer.step()
        return loss

    def evaluate(self, tokens: TokenArray, length: int) -> tuple[float, int]:
        """Return the summed loss in nats and the number of predicted tokens over whole windows."""
        rows = max(1, self.settings.micro_batch_tokens // length)
        starts = range(0, len(tokens) - rows * length, rows * length)
        total = 0.0
        with torch.no_grad():
            for start in starts:
                part = tokens[start : start + rows * length + 1].astype(numpy.int64)
                ids = torch.from_numpy(part).unfold(0, length + 1, length).contiguous()
                total += self.loss(ids.to(self.device)).item() * rows * length
        return total, len(starts) * rows * length


def plan(trainer: Trainer, tokens: TokenArray, phases: list[Phase], minutes: float, first: int = 0) -> dict[str, float]:
    """Measure the phases from ``first`` on and set their numbers of steps so that they take ``minutes``.

    Returns tokens per second by sequence length.  The model is left as it was.
    """
    settings, speeds = trainer.settings, dict[str, float]()
    shares = sum(phase.share for phase in phases[first:])
    for index, phase in enumerate(phases[first:], first):
        trainer.enter(phase.length)
        trainer.gradients(batch(tokens, settings, phase.length, index, 0))
        start = time.perf_counter()
        for step in range(4):
            trainer.gradients(batch(tokens, settings, phase.length, index, step))
        seconds = (time.perf_counter() - start) / 4
        trainer.optimizer.zero_grad()
        # The optimizer itself takes about two hundredths on top of the gradients.
        phase.steps = max(1, int(minutes * 60 * phase.share / shares / (seconds * 1.02)))
        speeds[str(phase.length)] = round(settings.batch_tokens / seconds)
    return speeds


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def save_checkpoint(work: Path, trainer: Trainer, progress: Progress) -> None:
    """Write the state of the run so that a cut-off leaves either the old file or the new one whole."""
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "progress": asdict(progress),
    }
    torch.save(state, work / "checkpoint.new")
    (work / "checkpoint.new").replace(work / "checkpoint.pt")


def load_checkpoint(work: Path, trainer: Trainer) -> Progress:
    """Restore the state of a run that was cut off."""
    state = torch.load(work / "checkpoint.pt", map_location=trainer.device, weights_only=True)
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    saved = state["progress"]
    saved["phases"] = [Phase(**phase) for phase in saved["phases"]]
    return Progress(**saved)


def note_held_out(trainer: Trainer, progress: Progress, tokens: TokenArray, length: int) -> None:
    """Measure the loss over the beginning of the held-out stream and add it to the progress."""
    total, count = trainer.evaluate(tokens[:65536], length)
    loss = total / count
    entry = {
        "step": progress.step,
        "window": length,
        "predicted_tokens": count,
        "loss": round(loss, 4),
        "perplexity": round(math.exp(loss), 3),
    }
    progress.held_out.append(entry)
    tqdm.write(f"held out: {json.dumps(entry)}")


def train(trainer: Trainer, progress: Progress, work: Path, training: TokenArray, held_out: TokenArray) -> None:
    """Run the steps that are left, with a checkpoint and a held-out measurement now and then."""
    settings, total = trainer.settings, progress.total_steps
    entered, started = -1, time.perf_counter() - progress.seconds
    bar = tqdm(range(progress.step, total), initial=progress.step, total=total, unit="step", mininterval=10)
    for step in bar:
        index, inner, done = progress.place(step)
        length = progress.phases[index].length
        if index != entered:
            trainer.enter(length)
            entered = index
        rate = learning_rate(settings, step, done)
        loss = trainer.step(batch(training, settings, length, index, inner), rate)
        progress.step, progress.seconds = step + 1, time.perf_counter() - started
        progress.losses.append({"step": step + 1, "tokens": (step + 1) * settings.batch_tokens, "loss": loss})
        bar.set_postfix(loss=f"{loss:.3f}", rate=f"{rate:.1e}", length=length, refresh=False)
        if (step + 1) % 250 == 0 and step + 1 < total:
            note_held_out(trainer, progress, held_out, length)
        if (step + 1) % 100 == 0:
            save_checkpoint(work, trainer, progress)
    save_checkpoint(work, trainer, progress)


# --------------------------------------------------------------------------------------------------
# Result
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The finished model as it will be read back: bfloat16 weights, computed in float32."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast

    def losses(self, ids: list[int]) -> torch.Tensor:
        """Return the loss in nats of each token of ``ids`` but the first, ``[tokens - 1]``."""
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = self.model(input_ids=row[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits[0], row[0, 1:], reduction="none")

    def complete(self, prompt: str, new_tokens: int, temperature: float) -> str:
        """Continue ``prompt``, which carries its own special tokens; greedily if ``temperature`` is 0."""
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        torch.manual_seed(0)
        output = self.model.generate(**ids, max_new_tokens=new_tokens, **sampling)
        return str(self.tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def build_result(work: Path, trainer: Trainer) -> Result:
    """Round the weights to bfloat16 and wrap the tokenizer."""
    model = LlamaForCausalLM(trainer.model.config)
    model.load_state_dict({name: each.bfloat16() for name, each in trainer.model.state_dict().items()})
    model.generation_config = GenerationConfig(
        bos_token_id=SPECIAL_TOKENS.index(BEGIN),
        eos_token_id=SPECIAL_TOKENS.index(END),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(work / "tokenizer.json")),
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        model_max_length=trainer.settings.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    return Result(model.eval(), tokenizer)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> NDArray[numpy.int64]:
    """Return how many bytes of text each token id stands for; special tokens stand for none."""
    # In a byte-level vocabulary every character of a token's name is one byte.
    lengths = numpy.zeros(len(tokenizer), dtype=numpy.int64)
    for name, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if name in SPECIAL_TOKENS else len(name)
    return lengths


def measure(result: Result, tokens: TokenArray, length: int) -> dict[str, Any]:
    """Measure the loss on the whole held-out stream in windows of ``length`` tokens."""
    lengths = token_bytes(result.tokenizer)
    rows = []
    for start in tqdm(range(0, len(tokens) - length, length), desc="held out", unit="window", leave=False):
        rows.append(result.losses(tokens[start : start + length + 1].astype(int).tolist()))
    losses = torch.stack(rows)
    text_bytes = int(lengths[tokens[1 : losses.numel() + 1]].sum())
    mean = losses.mean().item()
    edges = [0, *(2**power for power in range(8, 16) if 2**power < length), length]
    return {
        "window": length,
        "predicted_tokens": losses.numel(),
        "bytes": text_bytes,
        "loss_per_token": round(mean, 4),
        "perplexity_per_token": round(math.exp(mean), 3),
        "bits_per_byte": round(losses.sum().item() / math.log(2) / text_bytes, 4),
        "perplexity_per_byte": round(math.exp(losses.sum().item() / text_bytes), 4),
        "perplexity_by_position": {
            f"{low}-{high - 1}": round(losses[:, low:high].mean().exp().item(), 3) for low, high in pairwise(edges)
        },
    }


def measure_reference(result: Result) -> dict[str, Any]:
    """Measure the perplexity of one held-out function, for tests to compute again."""
    files = read_library(Path(sysconfig.get_path("stdlib")))
    held_out = [file for file in files if file.is_held_out and not file.is_test]
    sources = [source for file in held_out for _, _, source in documented_functions(file)]
    text = next(source for source in sources if len(source) > 600)
    losses = result.losses(result.tokenizer(text)["input_ids"])
    return {
        "text": text,
        "predicted_tokens": losses.numel(),
        "perplexity_per_token": round(losses.mean().exp().item(), 3),
    }


def chat_prompt(result: Result, question: str) -> str:
    """Render one user turn with the chat template."""
    messages = [{"role": "user", "content": question}]
    return str(result.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def take_samples(result: Result) -> list[dict[str, Any]]:
    """Continue a few fixed prompts."""
    start = "def fibonacci(n):"
    question = "Write a Python function `is_absolute`: Return True if the path is absolute."
    completion = result.complete(BEGIN + start, 96, temperature=0.7)
    answer = result.complete(chat_prompt(result, question), 160, temperature=0.0)
    return [
        {"kind": "completion", "temperature": 0.7, "prompt": start, "output": completion},
        {"kind": "chat", "temperature": 0.0, "prompt": question, "output": answer},
    ]


def processor_name() -> str:
    """Return the name of the processor, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def thin(losses: list[dict[str, float]], points: int = 200) -> list[dict[str, float]]:
    """Average the loss of each step over stretches of steps, so that about ``points`` are left."""
    size = max(1, math.ceil(len(losses) / points))
    curve = []
    for start in range(0, len(losses), size):
        stretch = losses[start : start + size]
        mean = sum(each["loss"] for each in stretch) / len(stretch)
        curve.append({"step": stretch[-1]["step"], "tokens": stretch[-1]["tokens"], "loss": round(mean, 4)})
    return curve


def describe(work: Path, trainer: Trainer, progress: Progress, result: Result) -> dict[str, Any]:
    """Measure the finished model and gather what ``training.json`` says."""
    training, held_out = prepare(work, trainer.settings.seed)
    data = json.loads((work / "data.json").read_text())
    on_gpu = trainer.device.type == "cuda"
    return {
        "model": "kvferry/tiny-python",
        "parameters": sum(each.numel() for each in result.model.parameters()),
        "data": {
            "source": f"standard library of Python {platform.python_version()}",
            **data,
            "training_tokens": len(training),
            "held_out_tokens": len(held_out),
        },
        "settings": asdict(trainer.settings),
        "phases": [asdict(phase) for phase in progress.phases],
        "steps": progress.step,
        "tokens": progress.step * trainer.settings.batch_tokens,
        "wall_seconds": round(progress.seconds),
        "tokens_per_second": {length: round(speed) for length, speed in progress.tokens_per_second.items()},
        "machine": {
            "device": torch.cuda.get_device_name() if on_gpu else processor_name(),
            "threads": torch.get_num_threads(),
            "precision": "bfloat16 autocast",
            "torch": torch.__version__,
        },
        "held_out": measure(result, held_out, progress.phases[-1].length),
        "reference": measure_reference(result),
        "samples": take_samples(result),
        "held_out_curve": progress.held_out,
        "curve": thin(progress.losses),
    }


def python_licence() -> str:
    """Return the licence text that this Python installation carries."""
    for directory in (Path(sysconfig.get_path("stdlib")), Path(sys.base_prefix)):
        for name in ("LICENSE.txt", "LICENSE"):
            if (directory / name).is_file():
                return (directory / name).read_text(encoding="utf-8")
    printer: Any = builtins.license
    printer._Printer__setup()
    return "\n".join(printer._Printer__lines)


def model_card(facts: dict[str, Any]) -> str:
    """Write the model card from the facts in ``training.json``."""
    held_out, settings, data = facts["held_out"], facts["settings"], facts["data"]
    positions = "\n".join(f"| {span} | {value:.2f} |" for span, value in held_out["perplexity_by_position"].items())
    phases = " then ".join(f"{each['steps']:,} steps of {each['length']}" for each in facts["phases"])
    samples = "".join(
        f"{each['kind'].capitalize()} at temperature {each['temperature']} of ``{each['prompt']}``:\n\n```python\n"
        + (each["prompt"] if each["kind"] == "completion" else "")
        + f"{each['output']}\n```\n\n"
        for each in facts["samples"]
    )
    return CARD.format(
        **facts, **held_out, positions=positions, phase_text=phases, sample_text=samples,
        minutes=facts["wall_seconds"] / 60, millions=facts["parameters"] / 1e6,
        tokens_millions=facts["tokens"] / 1e6, head=settings["hidden_size"] // settings["query_heads"],
        training_millions=data["training_tokens"] / 1e6,
    )  # fmt: skip


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the tokenizer's files, with the class and key names that every release of transformers reads."""
    tokenizer.save_pretrained(output)
    path = output / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    values["additional_special_tokens"] = values.pop("extra_special_tokens")
    # Told that there is none, no class adds an unknown token of its own beyond the vocabulary.
    values["unk_token"] = None
    del values["backend"]
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def export(work: Path, output: Path, trainer: Trainer, progress: Progress) -> None:
    """Write the finished model, its numbers, its licence and its card to ``output``."""
    trainer.model.to("cpu")
    result = build_result(work, trainer)
    facts = describe(work, trainer, progress, result)
    output.mkdir(parents=True, exist_ok=True)
    result.model.to(torch.bfloat16).save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)
    save_tokenizer(result.tokenizer, output)
    (output / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (output / "LICENSE").write_text(LICENCE_HEAD + python_licence(), encoding="utf-8")
    (output / "README.md").write_text(model_card(facts), encoding="utf-8")


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def parse_phase(text: str) -> Phase:
    """Read ``LENGTH:SHARE``."""
    length, _, share = text.partition(":")
    return Phase(int(length), float(share))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=HELP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="where the finished model goes (default: the directory 'model' inside --work)",
    )
    add(
        "--work",
        type=Path,
        default=Path("build/tiny-python"),
        metavar="DIR",
        help="scratch directory for tokens and checkpoints (default: build/tiny-python)",
    )
    add(
        "--minutes",
        type=float,
        default=60.0,
        help="time the optimizer steps may take; the numbers of steps follow from a short "
        "measurement and then stay fixed (default: 60)",
    )
    add(
        "--phases",
        type=parse_phase,
        nargs="+",
        default=[Phase(256, 0.6), Phase(2048, 0.4)],
        metavar="LENGTH:SHARE",
        help="sequence lengths, and the share of the time given to each (default: 256:0.6 2048:0.4)",
    )
    add("--resume", action="store_true", help="go on from the last checkpoint in --work")
    add(
        "--replan",
        action="store_true",
        help="with --resume: measure again, and give --minutes to the phases that have not begun",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use torch.compile, which needs a C++ compiler (default: yes)",
    )
    add("--threads", type=int, default=1, help="processor threads (default: 1)")
    return parser.parse_args(arguments)


def start(options: argparse.Namespace, trainer: Trainer, training: TokenArray) -> Progress:
    """Return the progress to go on from: a checkpoint's, or a fresh one with a plan."""
    if not options.resume:
        speeds = plan(trainer, training, options.phases, options.minutes)
        return Progress(options.phases, tokens_per_second=speeds)
    progress = load_checkpoint(options.work, trainer)
    if options.replan:
        ahead = progress.place(progress.step)[0] + 1
        speeds = plan(trainer, training, progress.phases, options.minutes, ahead)
        progress.tokens_per_second |= speeds
    return progress


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit status."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings()
    training, held_out = prepare(options.work, settings.seed)
    print(f"{len(training):,} training tokens, {len(held_out):,} held-out tokens", file=sys.stderr)
    trainer = Trainer(settings, device, options.compile)
    progress = start(options, trainer, training)
    print(f"plan: {progress.phases} at {progress.tokens_per_second} tokens/s", file=sys.stderr)
    train(trainer, progress, options.work, training, held_out)
    output = options.output or options.work / "model"
    export(options.work, output, trainer, progress)
    print((output / "README.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
