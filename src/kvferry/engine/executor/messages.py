"""The messages between rank 0 and the other ranks of an instance, and the pipe that carries them.

Rank 0 sends commands. Each command except `Proceed` and `Close` has an answer, which its docstring names. `Reported`
and `RankFailed` are sent without being asked for. The pipe is a socket pair that the child inherits, so no other
process can reach it.
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
"""How long the other side may leave a message unread; both read all the time."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# From rank 0.


class LoadModel(_Message, frozen=True, tag=True):
    """The first: load this share of the model. Answered by `Started` and, when it is loaded, by `ModelLoaded`. Holds
    the token."""

    rank: int
    size: int
    store: str
    config: EngineConfig
    transfer: KVTransferConfig | None
    auth_token: str


class OpenCache(_Message, frozen=True, tag=True):
    """Make a KV cache and join the connector. Answered by `Opened`."""

    num_blocks: int


class RankStep(_Message, frozen=True, tag=True):
    """Begin the plans, compute the inputs. Answered by `Done`. Plans are the connector's own, encoded; `first_plan`
    and `num_late` as in `PlanQueue`."""

    inputs: StepInputs | None
    plans: list[bytes]
    first_plan: int
    num_late: int


class Proceed(_Message, frozen=True, tag=True):
    """Rank 0 has left the step in which you failed, too: go on. Not answered."""


class GetStatistics(_Message, frozen=True, tag=True):
    """Answered by `Statistics`."""


class Check(_Message, frozen=True, tag=True):
    """Answered by `Checked`."""


class Close(_Message, frozen=True, tag=True):
    """Give everything back, and end."""


Command = LoadModel | OpenCache | RankStep | Proceed | GetStatistics | Check | Close


# From the other ranks.


class Started(_Message, frozen=True, tag=True):
    """The process is up, and about to meet the others."""


class ModelLoaded(_Message, frozen=True, tag=True):
    """The model is loaded; there is memory for this many KV blocks."""

    fingerprint: str
    max_num_blocks: int


class Opened(_Message, frozen=True, tag=True):
    """Where peers reach this rank's worker side, if they do."""

    address: dict[str, Any] | None


class Done(_Message, frozen=True, tag=True):
    """The step is done. `report` is an encoded `TransferReport`; `num_begun`: plans begun since the start. `failure`:
    what was raised here; this rank then waits for `Proceed`, and ends when none comes."""

    report: bytes
    num_begun: int
    failure: str = ""


class Statistics(_Message, frozen=True, tag=True):
    """Of the worker side."""

    values: dict[str, float]


class Checked(_Message, frozen=True, tag=True):
    """What was not released; empty if everything was."""

    leak: str


class Reported(_Message, frozen=True, tag=True):
    """Transfers moved on between two steps. `report` is an encoded `TransferReport`."""

    report: bytes


class RankFailed(_Message, frozen=True, tag=True):
    """This rank ends, and why; `kind` is the error's class."""

    kind: str
    message: str


Answer = Started | ModelLoaded | Opened | Done | Statistics | Checked
Message = Answer | Reported | RankFailed

_commands, _messages = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(Message)


class Pipe:
    """One end of the pipe. One thread may send while another receives."""

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor over."""
        with socket.socket(fileno=descriptor) as end:
            seconds = struct.pack("ll", int(SEND_S), 0)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            self._connection = Connection(end.detach())

    def send(self, message: Command | Message) -> None:
        """Raises `PeerLost` when the other side is gone, or does not read."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError as error:
            raise PeerLost(f"the other end of the pipe is gone: {error}") from error

    def receive_command(self) -> Command:
        """Waits. Raises `PeerLost` at the end, `ProtocolError` when it cannot be read."""
        return self._receive(_commands)

    def receive_message(self) -> Message:
        """Waits. Raises `PeerLost` at the end, `ProtocolError` when it cannot be read."""
        return self._receive(_messages)

    def _receive(self, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        try:
            return decoder.decode(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (OSError, EOFError) as error:
            raise PeerLost("the other end of the pipe is gone") from error
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a message between ranks cannot be read: {error}") from error

    def close(self) -> None:
        """For the end of the thread that receives, too: call it when that thread has ended, or never will."""
        self._connection.close()
