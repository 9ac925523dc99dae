"""The parsers of the answers to a chat request, and the constraint on their tokens."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from kvferry.api.requests import ChatCompletionRequest
from kvferry.api.structured_outputs import constraint_of
from kvferry.api.tools import ToolUse
from kvferry.core.errors import InvalidRequest
from kvferry.core.structured_outputs import AnswerGrammar, CallableFunction, Calls, StructuredOutputs
from kvferry.engine.server.output_parsers.answer_reader import AnswerReader, CallIds
from kvferry.engine.server.output_parsers.table import AnswerFormat, OutputParsers
from kvferry.engine.server.prompts import Prompt
from kvferry.engine.structured.library import can_constrain


@dataclass(frozen=True)
class ChatAnswerSpec:
    """The constraint on the answers to one chat request, and their parsers. `answer_id`: the id of all its answers."""

    format: AnswerFormat
    tool_use: ToolUse
    constraint: StructuredOutputs | None
    answer_id: str
    prompt: Prompt

    def reader(self, index: int, seed: int | None) -> AnswerReader | None:
        """The reader of choice `index`; None: its text is its content. The ids of its tool calls are derived from the
        request's id, the prompt, the seed and the choice, so that another instance that continues the answer derives
        the same ids."""
        parser = self.format.make()
        if parser is None:
            return None
        # Clients may repeat a request's id, and the tool calls of one conversation must not share an id.
        tokens = array("Q", self.prompt.token_ids) if self.tool_use.functions else array("Q")
        prompt = hashlib.sha256(tokens.tobytes()).hexdigest()
        key = f"{self.answer_id} {prompt} {seed} {index}".encode()
        ids = CallIds(key, is_short=self.format.has_short_ids)
        may_call = self.tool_use.mode != "none"
        return AnswerReader(parser, ids, may_call=may_call, max_calls=None if self.tool_use.parallel else 1)


def chat_answers(parsers: OutputParsers, body: ChatCompletionRequest, prompt: Prompt, answer_id: str) -> ChatAnswerSpec:
    """The constraint and the parsers that a request needs. Raises `InvalidRequest`."""
    use = body.tool_use()
    text = constraint_of(body.response_format, body.structured_outputs)
    may_call = use.mode != "none"
    is_forced = use.mode == "required" or (may_call and text is not None)
    budget = body.thinking_token_budget
    answer_format = parsers.answer_format(
        prompt.text or "",
        tools=[body.tools[position] for position in use.positions] if may_call and body.tools else (),
        is_forced=is_forced,
        is_required=use.mode == "required",
        is_json=text is not None and text.kind == "json",
        continued=_answer_beginning(body),
        max_thought_tokens=None if budget == -1 else budget,
    )
    if budget is not None and budget != -1 and parsers.reasoning is not None and parsers.reasoning.thought is None:
        raise InvalidRequest(
            "thinking_token_budget needs a model whose reasoning has a fixed text at its beginning and at its end",
            param="thinking_token_budget",
        )
    calls = _calls(use, answer_format, is_forced=is_forced, parsers=parsers) if may_call else None
    if use.mode == "required":
        text = None
    constraint = _constraint(AnswerGrammar(thought=answer_format.thought, calls=calls, text=text))
    return ChatAnswerSpec(answer_format, use, constraint, answer_id, prompt)


def _answer_beginning(body: ChatCompletionRequest) -> str | None:
    """The beginning of the answer, if the request has it (`continue_final_message`)."""
    if not body.continue_final_message:
        return None
    content = body.messages[-1].get("content")
    return content if isinstance(content, str) else ""


def _calls(use: ToolUse, answer_format: AnswerFormat, *, is_forced: bool, parsers: OutputParsers) -> Calls | None:
    """The grammar of tool calls; None: none is needed. It is needed if calls are forced, or if a function is strict and
    the format has a token that marks where a call begins."""
    form = answer_format.form
    can_be_strict = form is not None and parsers.is_token(form.begin or form.call[0]) and can_constrain()
    if form is None or not (is_forced or (_any_strict(use) and can_be_strict)):
        return None
    is_required = use.mode == "required"
    functions = tuple(
        CallableFunction(
            name=function.name,
            schema=(function.parameters or {}) if is_required or function.strict else {},
            field=f"tools[{position}].function.parameters",
        )
        for position, function in zip(use.positions, use.functions, strict=True)
    )
    return Calls(form=form, functions=functions, required=is_required, parallel=use.parallel)


def _any_strict(use: ToolUse) -> bool:
    return any(function.strict for function in use.functions)


def _constraint(grammar: AnswerGrammar) -> StructuredOutputs | None:
    """The constraint of the whole answer; None: the answer is free."""
    thought, text = grammar.thought, grammar.text
    if grammar.calls is not None:
        return grammar.constraint("tool_choice" if grammar.calls.required else "tools")
    if text is not None:
        return text if thought is None else grammar.constraint(text.field)
    return (
        grammar.constraint("thinking_token_budget") if thought is not None and thought.max_tokens is not None else None
    )
