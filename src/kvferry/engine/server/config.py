"""Settings of the engine's HTTP server."""

from __future__ import annotations

from kvferry.core.settings.bounds import Count
from kvferry.http.server.config import HttpConfig


class ServerConfig(HttpConfig, frozen=True, kw_only=True):
    """Address, limits and shutdown of the server."""

    max_choices: Count = 128
    """Max number of choices of one request: its prompts times its n."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    default_chat_template_kwargs: str | None = None
