"""Prints the endpoints, request fields and flags of the vLLM that this Python has, as JSON, one entry a line.

    .venv-vllm/bin/python scripts/vllm_api.py > scripts/docs_site/vllm_api.json

A page of the site compares them with kvferry's; a test compares this file with the installed vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def describe() -> dict[str, Any]:
    """Version, endpoints with their methods (of servers for text, embeddings, scores and speech), fields and flags."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    import vllm  # type: ignore[import-not-found,unused-ignore]
    from vllm.entrypoints.launchers.app import build_app  # type: ignore[import-not-found,unused-ignore]
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found,unused-ignore]
    from vllm.entrypoints.openai.chat_completion.protocol import (  # type: ignore[import-not-found,unused-ignore]
        ChatCompletionRequest,
    )
    from vllm.entrypoints.openai.completion.protocol import (  # type: ignore[import-not-found,unused-ignore]
        CompletionRequest,
    )
    from vllm.tasks import SupportedTask  # type: ignore[import-not-found,unused-ignore]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found,unused-ignore]

    parser = make_arg_parser(FlexibleArgumentParser())
    app = build_app(parser.parse_args([]), _names(SupportedTask), _AnyModel())
    endpoints = {
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", None) or ["WEBSOCKET"]
        if type(route).__name__ != "Mount" and method != "HEAD" and not route.path.startswith(("/docs", "/redoc"))
    }
    flags = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    return {
        "version": vllm.__version__.partition("+")[0],
        "endpoints": sorted(f"{path} {method}" for method, path in endpoints),
        "chat_fields": sorted(ChatCompletionRequest.model_fields),
        "completion_fields": sorted(CompletionRequest.model_fields),
        "flags": sorted(flag for flag in flags if not flag.startswith("--no-")),
    }


class _AnyModel:
    """In place of a model's configuration: one that embeds, too."""

    model = "any"

    def get_pooling_task(self, tasks: tuple[str, ...]) -> str:
        """The task for which a server has its endpoints."""
        return "embed"


def _names(kind: Any) -> tuple[str, ...]:
    """The values of a `Literal`, or of a union of several."""
    parts = getattr(kind, "__args__", ())
    return tuple(name for part in parts for name in ([part] if isinstance(part, str) else _names(part)))


if __name__ == "__main__":
    json.dump(describe(), sys.stdout, indent=0)
    sys.stdout.write("\n")
