"""The messages between rank 0 and the other ranks of an instance, and the pipe that carries them.

Rank 0 sends commands. Each one except `Proceed` and `Close` is answered, as its docstring says. `Reported` and
`RankFailed` are sent unasked. The pipe is a socket pair that the child inherits, so no other process can reach it.
"""

from __future__ import annotations

import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvferry.core.errors import PeerLost, ProtocolError
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.model_runner import StepInputs

MAX_MESSAGE_BYTES = 256 * 2**20
SEND_S = 60.0
"""How long the other side may leave messages unread. On both sides a thread reads all the time."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# From rank 0.


class LoadModel(_Message, frozen=True, tag=True):
    """The first command: load this rank's share of the model. Answered by `Started` at once, and by `ModelLoaded`
    afterwards. `store`: the file of `group.meeting`."""

    rank: int
    size: int
    store: str
    config: EngineConfig
    transfer: KVTransferConfig | None
    auth_token: str


class OpenCache(_Message, frozen=True, tag=True):
    """Allocate the KV cache and build the connector's worker side. Answered by `Opened`."""

    num_blocks: int


class RankStep(_Message, frozen=True, tag=True):
    """Begin the plans, and compute the inputs. Answered by `Done`. Plans are encoded; `first_plan` and `num_late` are
    `first` and `num_late` of `PlanQueue`."""

    inputs: StepInputs | None
    plans: list[bytes]
    first_plan: int
    num_late: int


class Proceed(_Message, frozen=True, tag=True):
    """Rank 0 has also left the step in which this rank failed: go on. Not answered."""


class GetStatistics(_Message, frozen=True, tag=True):
    """`HasStatistics.statistics`. Answered by `Statistics`."""


class Check(_Message, frozen=True, tag=True):
    """`HasStatistics.check`. Answered by `Checked`."""


class Close(_Message, frozen=True, tag=True):
    """Release everything, and exit. Not answered."""


Command = LoadModel | OpenCache | RankStep | Proceed | GetStatistics | Check | Close


# From the other ranks.


class Started(_Message, frozen=True, tag=True):
    """The process is running, and about to join the process group."""


class ModelLoaded(_Message, frozen=True, tag=True):
    """The model is loaded; there is memory for this many KV blocks."""

    fingerprint: str
    max_num_blocks: int


class Opened(_Message, frozen=True, tag=True):
    """The KV cache is there. `address`: `ServesPeers.address`."""

    address: dict[str, Any] | None


class Done(_Message, frozen=True, tag=True):
    """The step is over. `report`: an encoded `TransferReport`. `num_begun`: plans begun since the start. `failure`: the
    error if the step failed here; this rank then waits for `Proceed`, and exits if it does not come."""

    report: bytes
    num_begun: int
    failure: str = ""


class Statistics(_Message, frozen=True, tag=True):
    """Metrics by name, as `HasStatistics.statistics`."""

    values: dict[str, float]


class Checked(_Message, frozen=True, tag=True):
    """The message of the `LeakError` that `HasStatistics.check` raised; empty if it raised none."""

    leak: str


class Reported(_Message, frozen=True, tag=True):
    """What happened to transfers between two steps. `report`: an encoded `TransferReport`."""

    report: bytes


class RankFailed(_Message, frozen=True, tag=True):
    """Why this rank exits. `kind`: the name of the error's class."""

    kind: str
    message: str


Answer = Started | ModelLoaded | Opened | Done | Statistics | Checked
Message = Answer | Reported | RankFailed

_commands, _messages = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(Message)


class Pipe:
    """One end of the pipe. One thread may send while another receives."""

    def __init__(self, descriptor: int) -> None:
        """Owns the descriptor from now on."""
        with socket.socket(fileno=descriptor) as end:
            seconds = struct.pack("ll", int(SEND_S), 0)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            self._connection = Connection(end.detach())

    def send(self, message: Command | Message) -> None:
        """Raises `PeerLost` if the other side is gone, or does not read for `SEND_S`."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError as error:
            raise PeerLost(f"the other end of the pipe is gone: {error}") from error

    def receive_command(self) -> Command:
        """Wait for a command. Raises `PeerLost` if the other side is gone, `ProtocolError` if it cannot be read."""
        return self._receive(_commands)

    def receive_message(self) -> Message:
        """Wait for a rank's message. Raises as `receive_command`."""
        return self._receive(_messages)

    def _receive(self, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        try:
            return decoder.decode(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (OSError, EOFError) as error:
            raise PeerLost("the other end of the pipe is gone") from error
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a message between ranks cannot be read: {error}") from error

    def close(self) -> None:
        """Close this end. The thread that receives must have ended."""
        self._connection.close()
