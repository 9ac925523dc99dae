"""Switches the role of a server that must be idle for this: SGLang's, with POST /pd_role_switch.

kvferry's instances and vLLM's do both phases all the time, so that a role is only what routers send them. An SGLang
server is started for one phase; with `--enable-pd-role-switch` (0.5.23) it changes to the other one while nothing runs
there. So its requests are drained first, then the routers remove it, it switches, and they add it in its new role.

A server changes its role once. After a second change to prefill, hand-offs from it wait without end (0.5.23, seen in
2026-11): decode servers keep the address that it had before the first one, as its bootstrap server goes on answering.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError
from kvferry.fleet.spec.fleet_spec import MemberRole
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin

_PATH = "/pd_role_switch"
_JSON = [(b"content-type", b"application/json")]


class NotSwitched(KvferryError):
    """The server keeps its role, or has none. The message has the reason."""


def require_first_switch(name: str, role: MemberRole) -> None:
    """Raise `NotSwitched` for a member that would return to the role for which it was started (its name has this
    role)."""
    if name.rpartition("-")[0].endswith(role):
        raise NotSwitched("an SGLang server changes its role once")


class _Answer(msgspec.Struct):
    success: bool = False
    message: str = ""
    safe_to_restore: bool = False


async def switch_server(
    url: str,
    role: MemberRole,
    clock: Clock,
    *,
    total_timeout_s: float,
    timeout_s: float = 30.0,
    retry_interval_s: float = 0.25,
) -> None:
    """Switch the SGLang server at `url` to this role, once it is idle. The request is repeated every `retry_interval_s`
    while it is not; each answer may take `timeout_s`. Raises `NotSwitched`, also when `total_timeout_s` is over.

    `decode_cuda_graph_memory_gb`: memory that must be free for CUDA graphs. A decode server captures graphs if it can,
    and serves without them otherwise.
    """
    body = msgspec.json.encode({"new_role": role, "decode_cuda_graph_memory_gb": 0.0})
    deadline = clock.monotonic() + total_timeout_s
    try:
        async with HttpClient(client_name="the fleet's controller") as client:
            while True:
                status, _, content = await client.ask(
                    Origin.parse(url), "POST", _PATH, timeout_s=timeout_s, headers=_JSON, body=body
                )
                answer = _Answer()
                with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    answer = msgspec.json.decode(content, type=_Answer)
                if status == 200 and answer.success:
                    return
                reason = answer.message or content[:300].decode(errors="replace")
                is_busy = answer.safe_to_restore and "not idle" in answer.message
                if not is_busy or clock.monotonic() >= deadline:
                    raise NotSwitched(f"POST {_PATH} is answered with {status}: {reason}")
                await asyncio.sleep(retry_interval_s)
    except NotSwitched:
        raise
    except KvferryError as error:
        raise NotSwitched(f"POST {_PATH}: {error}") from error
