"""The calls that `tools` and `tool_choice` permit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.api.requests import ChatCompletionRequest
from kvferry.api.tools import MAX_TOOLS, ToolUse
from kvferry.core.errors import InvalidRequest


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [function("f"), function("g", parameters={"type": "object"}), function("h", strict=True)]


def use_of(**fields: Any) -> ToolUse:
    return msgspec.convert({"messages": [], "tools": TOOLS, **fields}, ChatCompletionRequest).tool_use()


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function(name) for name in names]}}


@pytest.mark.parametrize(
    ("fields", "mode", "names", "shown", "parallel"),
    [
        ({}, "auto", "fgh", "fgh", True),
        ({"tool_choice": "none"}, "none", "fgh", "fgh", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "required", "fgh", "fgh", False),
        ({"tool_choice": function("g")}, "required", "g", "fgh", False),
        ({"tool_choice": allowed("auto", "h", "f", "f")}, "auto", "fh", "fh", True),
        ({"tool_choice": allowed("required", "h")}, "required", "h", "fgh", True),
        ({"tools": []}, "none", "", "", True),
        ({"tools": None, "tool_choice": "auto"}, "none", "", "", True),
    ],
)
def test_what_is_permitted(fields: dict[str, Any], mode: str, names: str, shown: str, parallel: bool) -> None:
    use = use_of(**fields)
    assert (use.mode, "".join(entry.name for entry in use.functions)) == (mode, names)
    assert "".join("fgh"[position] for position in use.positions) == names
    assert "".join("fgh"[position] for position in use.shown) == shown
    assert use.parallel == parallel


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [function("get weather")]}, "tools[0].function.name", "letters"),
        ({"tools": [function("")]}, "tools[0].function.name", "1 to 256"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only 'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "missing required field"),
        ({"tools": [function("f"), function("f")]}, "tools", "'f'"),
        ({"tools": [function("f", parameters={"type": "string"})]}, "tools[0].function.parameters.type", "object"),
        ({"tools": [function(f"f{number}") for number in range(MAX_TOOLS + 1)]}, "tools", "at most"),
        ({"tool_choice": function("ff")}, "tool_choice.function", "did you mean 'f'"),
        ({"tool_choice": allowed("auto", "zzz")}, "tool_choice.allowed_tools", "'zzz' is not one of tools"),
        ({"tools": [], "tool_choice": function("f")}, "tool_choice.function", "is not one of tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        use_of(**fields)
    assert caught.value.param == param
