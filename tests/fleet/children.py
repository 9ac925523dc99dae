"""Programs for tests to run as members of a fleet: they speak the start protocol, and do one thing each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from kvferry.fleet.processes.process import ProcessSpec

_BEGIN = """
import json, os, signal, sys, threading
from kvferry.fleet.processes.ready import ReadyWriter

# The tests' own arguments, then "--ready-fd N" from the backend.
ready_fd = int(sys.argv[-1])
assert sys.argv[-2] == "--ready-fd"
arguments = sys.argv[1:-2]

writer = ReadyWriter(ready_fd)

def serve(url="http://here:1"):
    writer.ready({"url": url})

def forever():
    while True:
        signal.pause()
"""

GOOD = """
writer.progress("loading", 0.5)
print("a line of", arguments[0], flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("told to end", flush=True), sys.exit(0)))
serve(arguments[1])
forever()
"""
"""Serves at its second argument until SIGTERM."""

NEVER_SERVES = """
writer.progress("loading", 0.5)
forever()
"""
"""Loads, and goes on to."""

STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
serve()
forever()
"""
"""Does not end on SIGTERM."""

CRASHING = """
for number in range(30):
    print("line", number)
print("the last words", file=sys.stderr)
sys.exit(7)
"""
"""Ends before it serves."""

CRASHING_WHEN_TOLD = """
serve()
signal.signal(signal.SIGUSR1, lambda *_: os.abort())
print("pid", os.getpid(), flush=True)
forever()
"""
"""Serves, and is killed by a signal of its own making on SIGUSR1."""

HEALTHY = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(arguments[0].removeprefix("--port="))
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
scheme = "http"
if len(arguments) > 1:
    import ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(arguments[1], arguments[2])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "https"
print("pid", os.getpid(), flush=True)
serve(f"{scheme}://127.0.0.1:{server.server_address[1]}")
server.serve_forever()
"""
"""Serves and answers /health, at the port of its first argument, --port=N; under TLS where a certificate and its key
follow."""

SILENT = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    serve(f"http://127.0.0.1:{server.getsockname()[1]}")
    forever()
"""
"""Accepts connections, and answers nothing."""

ANSWERING = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    writer.ready({"url": url, "health_url": url})
    while True:
        with server.accept()[0] as client:
            client.recv(4096)
            client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""
"""Answers everything with 200."""

WRONG = """
print("kvferry: error: the model is not there; name another", file=sys.stderr)
sys.exit(2)
"""
"""Was told something wrong."""

SLOW = """
writer.progress("loading for ever", 0.1)
forever()
"""
"""Never serves."""

PARENT = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("grandchild", child.pid, flush=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
serve()
forever()
"""
"""Has a child of its own, which it leaves behind."""

SHOWING = """
print(json.dumps({
    "cores": sorted(os.sched_getaffinity(0)),
    "threads": os.environ["OMP_NUM_THREADS"],
    "token": os.environ.get("KVFERRY_AUTH_TOKEN"),
    "hidden": os.environ.get("KVFERRY_HIDDEN"),
    "leads_session": os.getsid(0) == os.getpid(),
    "stdin": sys.stdin.read(),
}), flush=True)
serve()
forever()
"""
"""Prints what it finds around it."""


def child(name: str, program: str, *arguments: str, **settings: object) -> ProcessSpec:
    """A child that runs one of the programs above."""
    environment = settings.pop("environment", {})
    assert isinstance(environment, Mapping)
    command = (sys.executable, "-c", _BEGIN + program, *arguments)
    return ProcessSpec(name=name, command=command, environment=environment, **settings)  # type: ignore[arg-type]


def is_program(command: Sequence[str]) -> bool:
    """Whether a process with this command line runs one of them."""
    return any(argument.startswith(_BEGIN) for argument in command)
