"""Stands in for a Python with vLLM: knows two command lines of kvferry's, and serves what vLLM serves, as far as the
router asks. It checks that D gets the ticket that P gave."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TICKET = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_block_ids": [[1]]}


class Server(BaseHTTPRequestHandler):
    """One vLLM server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]},
        }
        self._answer(200 if self.path in answers else 404, answers.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            self._answer(200, {"kv_transfer_params": TICKET})
            return
        self._answer(200, {"arguments": sys.argv[1:], "ticket_is_p_s": params.items() >= TICKET.items()})

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Not one."""


def main(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        print(
            json.dumps({"vllm": "0.32.0", "kvferry": True, "on_cpu": True, "missing_libraries": [], "connectors": []})
        )
        return
    assert arguments[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"], arguments
    print("(Worker pid=1) Starting to load model", flush=True)
    address = [arguments[arguments.index(name) + 1] for name in ("--host", "--port")]
    ThreadingHTTPServer((address[0], int(address[1])), Server).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
