"""How a package shows that its pipe does what a pipe must: `pytest examples`."""

from pathlib import Path

from kvferry.testing.pipe import PipeContract


class TestUnixSocketPipe(PipeContract):
    transport = "unix_socket_pipe:UnixSocketFabric"
    path = str(Path(__file__).parent)
