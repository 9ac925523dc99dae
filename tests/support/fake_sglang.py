"""Stands in for SGLang's servers: takes their flags, and answers as far as kvferry asks. It moves no KV.

Each server writes the bodies of its completions to the file of its name in `$FAKE_SGLANG`, after its flags.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
from pathlib import Path
from typing import Any

PACKAGE = "sglang"


def make_package(folder: Path) -> None:
    """A package of SGLang's name, for PYTHONPATH."""
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").touch()
    (folder / PACKAGE / "launch_server.py").write_text(Path(__file__).read_text())


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model-path", "--served-model-name", "--host", "--disaggregation-transfer-backend"):
        parser.add_argument(name, default="")
    parser.add_argument("--port", type=int)
    parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"], default="null")
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--enable-pd-role-switch", action="store_true")
    parser.add_argument("--kv-events-config")
    flags = vars(parser.parse_args())
    seen = Path(os.environ["FAKE_SGLANG"]) / f"{flags['disaggregation_mode']}-{flags['port']}"
    seen.write_text(json.dumps(flags) + "\n")

    switches = iter(os.environ.get("FAKE_SGLANG_SWITCHES", "busy done").split())

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            match self.path:
                case "/health":
                    self._answer(200, "")
                case "/server_info":
                    self._answer(200, {**flags, "version": "0.5.9"})
                case "/metrics":
                    self._answer(200, 'sglang:num_running_reqs{model="m"} 0.0\n')
                case "/v1/models":
                    self._answer(200, {"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]})
                case _:
                    self._answer(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.open("a") as file:
                file.write(json.dumps(body) + "\n")
            if self.path == "/pd_role_switch":
                self._switch(body["new_role"])
                return
            choice = {"index": 0, "text": flags["disaggregation_mode"], "finish_reason": "stop"}
            self._answer(200, {"id": "1", "object": "text_completion", "model": "m", "choices": [choice]})

        def _switch(self, role: str) -> None:
            match next(switches, "done"):
                case "busy":
                    message = "instance is not idle; drain all requests before switching"
                    self._answer(400, {"success": False, "message": message, "safe_to_restore": True})
                case "broken":
                    message = "role switch failed; instance unhealthy, restart required"
                    self._answer(400, {"success": False, "message": message, "safe_to_restore": False})
                case _:
                    flags["disaggregation_mode"] = role
                    self._answer(200, {"success": True, "message": "ok"})

        def _answer(self, status: int, body: Any) -> None:
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    http.server.ThreadingHTTPServer((flags["host"], flags["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
