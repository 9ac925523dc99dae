"""`tools` and `tool_choice` of a chat request, as OpenAI and vLLM name them, and the calls that they permit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec

from kvferry.core.errors import InvalidRequest

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")

ToolMode = Literal["none", "auto", "required"]


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function that the model may call. `parameters`: a JSON schema; None: any object. `strict`: its arguments are
    valid for the schema also where no call is forced, if the checkpoint's format of calls permits it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, kw_only=True):
    """One of a request's tools."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    """The name of a function."""

    name: str


class ToolName(msgspec.Struct, kw_only=True):
    """The name of a tool."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    """Some of a request's tools, of which the model may (`auto`) or must (`required`) call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceObject(msgspec.Struct, kw_only=True):
    """A tool that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


@dataclass(frozen=True)
class ToolUse:
    """The calls of an answer. `functions`: those that may be called, with their `positions` in `tools`. `shown`:
    positions of those that the model sees. `parallel`: it may call several."""

    mode: ToolMode = "none"
    functions: tuple[FunctionDefinition, ...] = ()
    positions: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()
    parallel: bool = True


def tool_use_of(
    tools: Sequence[dict[str, Any]] | None,
    choice: Literal["none", "auto", "required"] | ToolChoiceObject | None,
    *,
    parallel: bool | None,
) -> ToolUse:
    """The calls that the fields request. Raises `InvalidRequest` that names the field."""
    if len(tools or ()) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are accepted", param="tools")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    names = [function.name for function in functions]
    everything = tuple(range(len(functions)))
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools: two functions have the name {name!r}", param="tools")
    if isinstance(choice, ToolChoiceObject):
        mode, allowed, field = _chosen(choice)
        positions = tuple(sorted({_position(name, names, field) for name in allowed}))
        shown = positions if mode == "auto" else everything
    else:
        mode, positions, shown = choice or ("auto" if functions else "none"), everything, everything
        if mode == "required" and not functions:
            raise InvalidRequest("tool_choice 'required' needs tools", param="tool_choice")
    if not functions:
        return ToolUse()
    is_single = isinstance(choice, ToolChoiceObject) and choice.type == "function"
    chosen = tuple(functions[position] for position in positions)
    return ToolUse(mode, chosen, positions, shown, parallel=parallel is not False and not is_single)


def _function(tool: Any, field: str) -> FunctionDefinition:
    if isinstance(tool, dict) and tool.get("type", "function") != "function":
        raise InvalidRequest(f"{field}.type: only 'function' is supported", param=f"{field}.type")
    try:
        function = msgspec.convert(tool, ChatTool).function
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from error
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        raise InvalidRequest(
            f"{field}.function.parameters.type must be 'object': arguments are an object",
            param=f"{field}.function.parameters.type",
        )
    if not _NAME.fullmatch(function.name):
        raise InvalidRequest(
            f"{field}.function.name must be 1 to 256 letters, digits or any of _ . : / -",
            param=f"{field}.function.name",
        )
    return function


def _chosen(choice: ToolChoiceObject) -> tuple[ToolMode, list[str], str]:
    """The mode, the names, and the field that has them."""
    if choice.type == "function":
        if choice.function is None:
            raise InvalidRequest("tool_choice.function is required", param="tool_choice.function")
        return "required", [choice.function.name], "tool_choice.function"
    if choice.allowed_tools is None:
        raise InvalidRequest("tool_choice.allowed_tools is required", param="tool_choice.allowed_tools")
    names = [tool.function.name for tool in choice.allowed_tools.tools]
    return choice.allowed_tools.mode, names, "tool_choice.allowed_tools"


def _position(name: str, names: Sequence[str], field: str) -> int:
    if name not in names:
        near = get_close_matches(name[:256], names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequest(f"{field}: {name[:256]!r} is not one of tools{hint}", param=field)
    return names.index(name)
