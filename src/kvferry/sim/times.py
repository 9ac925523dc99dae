"""Durations on one machine: they replace the forward pass, bytes on a wire and the start of a process.

`kvferry calibrate` measures `MachineTimes` and writes them; `kvferry simulate --times` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import read_whole
from kvferry.core.settings.options import read_options
from kvferry.engine.config import EngineConfig
from kvferry.engine.scheduling.step import Chunk

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
MAX_FACTOR = 1e3
Factor = Annotated[float, msgspec.Meta(ge=0, le=MAX_FACTOR)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Bandwidth = Annotated[float, msgspec.Meta(gt=0, le=1e15)]


@dataclass(frozen=True)
class StepWork:
    """The work of a step, as the numbers on which its time depends.

    `prefill_pairs`: the number of tokens that each prefilled token attends to, summed; `context_tokens`: tokens whose
    KV is read, once for each sequence; `num_new`: sequences that were not in the previous step.
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    decode_sequences: int = 0
    context_tokens: int = 0
    num_new: int = 0

    @classmethod
    def of(cls, chunks: Sequence[Chunk], num_new: int = 0) -> StepWork:
        """The work of a step of these chunks. A chunk of one token counts as decode."""
        prefill = decodes = context = 0
        pairs = 0.0
        for chunk in chunks:
            number = chunk.num_tokens
            context += chunk.start + number
            if number == 1:
                decodes += 1
            else:
                prefill += number
                pairs += number * (chunk.start + (number + 1) / 2)
        return cls(prefill, pairs, decodes, context, num_new)


@dataclass(frozen=True)
class StepSample:
    """A measurement: this work, in `num_steps` steps, took `seconds` in total."""

    work: StepWork
    seconds: float
    num_steps: int = 1


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The duration of a step, in seconds: a sum over its work."""

    base_s: Seconds = 0.004
    """Seconds of every step."""
    prefill_token_s: Seconds = 40e-6
    """Seconds for each prefilled token."""
    prefill_pair_s: Seconds = 0.0
    """Seconds for each pair of a prefilled token and a token that it attends to."""
    decode_sequence_s: Seconds = 100e-6
    """Seconds for each sequence that decodes."""
    context_token_s: Seconds = 20e-9
    """Seconds for each token whose KV is read."""
    request_s: Seconds = 0.0
    """Seconds for each sequence that begins: reading its request and ending its answer."""
    decode_spread: list[Factor] = []
    """Durations of decode-only steps divided by their median: equally likely values. Empty: always 1."""
    prefill_spread: list[Factor] = []
    """The same for steps that prefill."""

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step with this work."""
        return (
            self.base_s
            + self.prefill_token_s * work.prefill_tokens
            + self.prefill_pair_s * work.prefill_pairs
            + self.decode_sequence_s * work.decode_sequences
            + self.context_token_s * work.context_tokens
            + self.request_s * work.num_new
        )

    def drawn(self, work: StepWork, random: Random) -> float:
        """Seconds of one step with this work, with the measured variation between steps."""
        spread = self.prefill_spread if work.prefill_tokens else self.decode_spread
        return self.seconds(work) * (random.choice(spread) if spread else 1.0)


class TransferTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Durations of transfers between two processes."""

    latency_s: Seconds = 50e-6
    """Seconds until another process has read a short message over HTTP, one way."""
    peer_s: Seconds = 50e-6
    """Seconds until another instance's connector has read a short message, one way."""
    wake_s: Seconds = 0.0
    """Seconds between an engine's thread and its connector's thread, in both directions."""
    token_s: Seconds = 0.0
    """CPU seconds that a router and a client take for each token of an answer."""
    bandwidth: Bandwidth = 10e9
    """Bytes of KV per second."""
    samples: list[tuple[float, float]] = []
    """Bytes and seconds of the measured hand-offs."""


class MediumTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Durations of a store's medium. Bandwidths in bytes of KV per second; several calls share them."""

    latency_s: Seconds = 100e-6
    """Seconds of each block, besides its bytes."""
    read_bandwidth: Bandwidth = 2e9
    write_bandwidth: Bandwidth = 1e9


class StoreTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The media of an instance's stores: files, and memory of its machine."""

    file: MediumTimes = MediumTimes()
    memory: MediumTimes = MediumTimes(latency_s=5e-6, read_bandwidth=5e9, write_bandwidth=5e9)


class KVSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache of an instance. `num_tokens`: its capacity."""

    num_layers: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    token_bytes: Positive
    """Bytes of the KV of one token in all layers."""
    num_tokens: Positive
    block_size: Positive = 32


class FitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The relative error of a fit's times against the measured ones."""

    num_samples: int
    p50: float
    p90: float
    largest: float


class MachineTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of one model on one machine."""

    model: str
    machine: str
    measured: str
    """The day."""
    step: StepTimes
    step_error: FitError
    kv: KVSize
    transfer: TransferTimes = TransferTimes()
    store: StoreTimes = StoreTimes()
    start_s: Seconds = 5.0
    """Seconds from the start of an instance until it answers."""
    max_model_len: Positive = 131072
    tensor_parallel_size: Positive = 1
    settings: dict[str, str] = {}
    """Flags of the measured engine."""
    samples: list[StepSample] = []
    """The measured steps to which `step` was fitted."""

    @property
    def max_num_seqs(self) -> int:
        """Max number of sequences that an instance runs at the same time."""
        setting = self.settings.get("max_num_seqs", "")
        return int(setting) if setting.isdecimal() else EngineConfig(model="").max_num_seqs


_TABLES: dict[str, type[msgspec.Struct]] = {
    "step": StepTimes,
    "step_error": FitError,
    "kv": KVSize,
    "transfer": TransferTimes,
    "store": StoreTimes,
}


def read_times(path: Path) -> MachineTimes:
    """The times in a file that `write_times` has written. Raises `ConfigError` that names the key."""
    try:
        values = msgspec.json.decode(read_whole(path), type=dict[str, object])
    except ConfigError as error:
        raise ConfigError(f"--times {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--times {path} is no file of `kvferry calibrate`: {error}") from error
    try:
        for name, kind in _TABLES.items():
            if isinstance(table := values.get(name), dict):
                values[name] = read_options(kind, table, name)
        return read_options(MachineTimes, values, "times")
    except ConfigError as error:
        raise ConfigError(f"--times {path}: {error}") from error


def write_times(path: Path, times: MachineTimes) -> None:
    """Write them as JSON. Raises `ConfigError`."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(times)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
