"""Structured answers, tool calls and texts by unmodified client libraries, whole and streamed, many at once.

    python client_calls.py URL LIBRARY COUNT AT_ONCE [CALL…]

Prints one line: a JSON list of COUNT pairs of a call's name and its result, or the error's class and text. Calls are
all of the library, or those that are named; call K is the one of their number K modulo their count, and asks one of
`NUM_QUESTIONS` questions.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Calls = dict[str, Callable[[str], Any]]
"""Calls by name; each takes the question."""

NUM_QUESTIONS = 5
TIMEOUT_S = 120
MAX_TOKENS = 2000
LIMITS: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}


class Leg(BaseModel):
    """A part of a voyage."""

    model_config = ConfigDict(extra="forbid")
    harbour: str = Field(min_length=16, max_length=30)
    passengers: int = Field(ge=0, le=999)
    sails: bool


class Voyage(BaseModel):
    """A voyage of a ferry."""

    model_config = ConfigDict(extra="forbid")
    captain: Literal["Ada", "Grace"]
    legs: list[Leg] = Field(min_length=1, max_length=2)


class Booking(BaseModel):
    """The arguments of `book`."""

    model_config = ConfigDict(extra="forbid")
    captain: Literal["Ada", "Grace"]
    harbour: Literal["Oslo", "Kiel"]
    days: Literal[1, 2, 3]


def book(captain: Literal["Ada", "Grace"], harbour: Literal["Oslo", "Kiel"], days: Literal[1, 2, 3]) -> str:
    """Book a voyage."""
    return f"{captain} {harbour} {days}"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "captain": {"enum": ["Ada", "Grace"]},
        "legs": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "harbour": {"type": "string", "minLength": 16, "maxLength": 30},
                    "passengers": {"type": "integer", "minimum": 0, "maximum": 999},
                },
                "required": ["harbour", "passengers"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["captain", "legs"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "plan", "parameters": SCHEMA, "strict": True}}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "voyage", "schema": SCHEMA, "strict": True}}
THOUGHT: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 40}


def user(question: str) -> list[Any]:
    """A conversation of one message."""
    return [{"role": "user", "content": question}]


def joined_choices(chunks: Any) -> list[Any]:
    """The choices of a streamed chat: content, reasoning, calls with their ids, finish reason."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            state = choices.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "finish": None})
            state["content"] += choice.delta.content or ""
            state["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            state["finish"] = choice.finish_reason or state["finish"]
            for call in choice.delta.tool_calls or ():
                if call.index == len(state["calls"]):
                    state["calls"].append([call.function.name, ""])
                state["calls"][call.index][1] += call.function.arguments or ""
    return [choices[index] for index in sorted(choices)]


def with_openai(url: str) -> Calls:
    """Chats, completions and Responses."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def chat(question: str, **options: Any) -> Any:
        arguments = {"seed": 5, **LIMITS, **options}
        return client.chat.completions.create(model="m", messages=user(question), **arguments)

    def parsed(question: str) -> Any:
        limits: Any = {"temperature": 0.7, "seed": 3, "max_tokens": MAX_TOKENS}
        with client.chat.completions.stream(
            model="m", messages=user(question), response_format=Voyage, **limits
        ) as stream:
            answer: Any = stream.get_final_completion().choices[0].message.parsed
            return answer.model_dump()

    def streamed(question: str, **options: Any) -> Any:
        return joined_choices(chat(question, stream=True, **options))

    def completion(question: str) -> Any:
        body = {"structured_outputs": {"regex": "([a-z]{2,7} ){30,50}end"}}
        chunks = client.completions.create(model="m", prompt=question, stream=True, extra_body=body, **LIMITS)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    tool: Any = {**TOOL["function"], "type": "function"}

    def response(question: str, **options: Any) -> Any:
        limits: Any = {"temperature": 0.0, "max_output_tokens": MAX_TOKENS, **options}
        *_, last = client.responses.create(model="m", input=question, stream=True, **limits)
        return [
            item.arguments if item.type == "function_call" else item.content[0].text
            for item in last.response.output
            if item.type in ("function_call", "message")
        ]

    def parsed_response(question: str) -> Any:
        limits: Any = {"temperature": 0.0, "max_output_tokens": MAX_TOKENS}
        with client.responses.stream(model="m", input=question, text_format=Voyage, **limits) as stream:
            answer: Any = stream.get_final_response().output_parsed
            return answer.model_dump()

    def conversation(question: str) -> Any:
        first = client.responses.create(model="m", input=question, temperature=0.0, max_output_tokens=60)
        return response("And then?", previous_response_id=first.id, tools=[tool], tool_choice="required")

    return {
        "chat, schema": lambda question: chat(question, response_format=FORMAT).choices[0].message.content,
        "chat, schema, streamed": lambda question: streamed(question, response_format=FORMAT),
        "chat, parsed": parsed,
        "chat, forced call": lambda question: [
            call.function.arguments
            for call in chat(question, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
            .choices[0]
            .message.tool_calls
        ],
        "chat, forced call, streamed": lambda question: streamed(
            question,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "plan"}},
            temperature=0.8,
        ),
        "chat, reasoning, schema, streamed": lambda question: streamed(
            question, response_format=FORMAT, extra_body=THOUGHT
        ),
        "chat, reasoning, call, streamed": lambda question: streamed(
            question, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, extra_body=THOUGHT
        ),
        "chat, choices, streamed": lambda question: streamed(question, n=3, response_format=FORMAT, temperature=0.9),
        "chat, text, streamed": lambda question: streamed(question, max_tokens=150),
        "completion, expression, streamed": completion,
        "responses, parsed, streamed": parsed_response,
        "responses, forced call, streamed": lambda question: response(
            question, tools=[tool], tool_choice="required", parallel_tool_calls=False
        ),
        "responses, conversation": conversation,
    }


def with_anthropic(url: str) -> Calls:
    """Messages, with thoughts, tools and schemas."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S)
    tools: list[Any] = [{"name": "plan", "description": "Plans.", "input_schema": SCHEMA}]
    forced: Any = {"tools": tools, "tool_choice": {"type": "tool", "name": "plan", "disable_parallel_tool_use": True}}
    schema: Any = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}

    def blocks(message: Any) -> Any:
        values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
        return [message.stop_reason, *([block.type, getattr(block, values[block.type])] for block in message.content)]

    def whole(question: str, **options: Any) -> Any:
        body = {"temperature": 0.0, **options.pop("extra_body", {})}
        arguments: Any = {"max_tokens": MAX_TOKENS, "messages": user(question), "extra_body": body, **options}
        return blocks(client.messages.create(model="m", **arguments))

    def streamed(question: str, **options: Any) -> Any:
        body = {"temperature": 0.0, **options.pop("extra_body", {})}
        arguments: Any = {"max_tokens": MAX_TOKENS, "messages": user(question), "extra_body": body, **options}
        with client.messages.stream(model="m", **arguments) as stream:
            return blocks(stream.get_final_message())

    thought: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": {"thinking_token_budget": 40}}
    return {
        "schema": lambda question: whole(question, **schema),
        "schema, streamed": lambda question: streamed(question, **schema),
        "forced call": lambda question: whole(question, **forced),
        "forced call, streamed": lambda question: streamed(question, **forced),
        "thinking, schema, streamed": lambda question: streamed(question, **schema, **thought),
        "thinking, forced call, streamed": lambda question: streamed(question, **forced, **thought),
        "text, streamed": lambda question: streamed(question, max_tokens=150),
    }


def with_litellm(url: str) -> Calls:
    """The chat API, and litellm's own translation of Messages and Responses."""
    import litellm

    import_module("httpx2")  # its first call would, and openai takes it half imported in other threads
    litellm.telemetry = False
    server: dict[str, Any] = {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "none", "timeout": TIMEOUT_S}
    limits: dict[str, Any] = {**LIMITS, "num_retries": 0}

    def chat(question: str, **options: Any) -> Any:
        return litellm.completion(messages=user(question), **server, **limits, **options)

    def response(question: str) -> Any:
        limits: Any = {"temperature": 0.0, "max_output_tokens": MAX_TOKENS, "num_retries": 0}
        text: Any = {"format": {"type": "json_schema", "name": "voyage", "schema": SCHEMA, "strict": True}}
        *_, last = litellm.responses(input=question, stream=True, text=text, **server, **limits)
        return [item.content[0].text for item in last.response.output if item.type == "message"]

    async def asynchronous(question: str) -> Any:
        chunks: Any = await litellm.acompletion(
            messages=user(question), stream=True, response_format=Voyage, **server, **limits
        )
        return joined_choices([chunk async for chunk in chunks])

    return {
        "schema": lambda question: chat(question, response_format=FORMAT).choices[0].message.content,
        "model, streamed": lambda question: joined_choices(chat(question, response_format=Voyage, stream=True)),
        "forced call, streamed": lambda question: joined_choices(
            chat(question, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True)
        ),
        "asynchronous, streamed": lambda question: asyncio.run(asynchronous(question)),
        "responses, schema, streamed": response,
    }


def with_instructor(url: str) -> Calls:
    """By forced calls, by schema, in parts, and several objects."""
    import instructor
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def create(mode: Any) -> Callable[[str], Any]:
        completions: Any = instructor.from_openai(client, mode=mode).chat.completions
        return lambda question: completions.create(
            model="m", response_model=Voyage, messages=user(question), max_retries=0, **LIMITS
        ).model_dump()

    def partial(mode: Any) -> Callable[[str], Any]:
        completions: Any = instructor.from_openai(client, mode=mode).chat.completions

        def last_part(question: str) -> Any:
            parts = completions.create_partial(
                model="m", response_model=Voyage, messages=user(question), max_retries=0, **LIMITS
            )
            return list(parts)[-1].model_dump()

        return last_part

    return {
        "tools": create(instructor.Mode.TOOLS),
        "strict tools": create(instructor.Mode.TOOLS_STRICT),
        "schema": create(instructor.Mode.JSON_SCHEMA),
        "tools, partial": partial(instructor.Mode.TOOLS),
        "schema, partial": partial(instructor.Mode.JSON_SCHEMA),
    }


def with_langchain(url: str) -> Calls:
    """`with_structured_output` by both methods, whole and streamed, forced calls, texts, and Responses."""
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
    model = ChatOpenAI(model="m", **options, **LIMITS)
    responses = ChatOpenAI(model="m", use_responses_api=True, **options, **LIMITS)
    forced = model.bind_tools([book], tool_choice="required", parallel_tool_calls=False, strict=True)

    def structured(method: Any) -> Callable[[str], Any]:
        runnable: Any = model.with_structured_output(Voyage, method=method)
        return lambda question: runnable.invoke(question).model_dump()

    def structured_stream(method: Any) -> Callable[[str], Any]:
        runnable: Any = model.with_structured_output(Voyage.model_json_schema(), method=method)
        return lambda question: list(runnable.stream(question))[-1]

    def joined(runnable: Any, question: str) -> Any:
        whole: Any = None
        for chunk in runnable.stream(question):
            whole = chunk if whole is None else whole + chunk
        return [whole.text, [[call["name"], call["args"]] for call in whole.tool_calls]]

    return {
        "schema": structured("json_schema"),
        "calls": structured("function_calling"),
        "schema, streamed": structured_stream("json_schema"),
        "calls, streamed": structured_stream("function_calling"),
        "forced call, streamed": lambda question: joined(forced, question),
        "text, streamed": lambda question: joined(model.bind(max_tokens=150), question),
        "responses, schema": lambda question: (
            responses.with_structured_output(Voyage, method="json_schema").invoke(question).model_dump()
        ),
    }


def with_pydantic_ai(url: str) -> Calls:
    """Answers by a forced call and by schema, whole and streamed, over chats and Responses."""
    from openai import AsyncOpenAI
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def whole(kind: Any, output: Any, question: str) -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            model = kind("m", provider=OpenAIProvider(openai_client=client))
            agent: Any = Agent(model, output_type=output, retries=0, model_settings=LIMITS)
            return (await agent.run(question)).output.model_dump()

    async def streamed(kind: Any, output: Any, question: str) -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            model = kind("m", provider=OpenAIProvider(openai_client=client))
            agent: Any = Agent(model, output_type=output, retries=0, model_settings=LIMITS)
            async with agent.run_stream(question) as stream:
                return (await stream.get_output()).model_dump()

    chats, responses = OpenAIChatModel, OpenAIResponsesModel
    return {
        "call": lambda question: asyncio.run(whole(chats, Voyage, question)),
        "schema": lambda question: asyncio.run(whole(chats, NativeOutput(Voyage), question)),
        "call, streamed": lambda question: asyncio.run(streamed(chats, Voyage, question)),
        "schema, streamed": lambda question: asyncio.run(streamed(chats, NativeOutput(Voyage), question)),
        "responses, schema, streamed": lambda question: asyncio.run(
            streamed(responses, NativeOutput(Voyage), question)
        ),
    }


def with_openai_agents(url: str) -> Calls:
    """Over chats and over Responses: an output by schema, and a forced call of a tool; whole and streamed."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    settings = ModelSettings(temperature=0.0, max_tokens=MAX_TOKENS)
    forced = ModelSettings(temperature=0.0, max_tokens=MAX_TOKENS, tool_choice="required", parallel_tool_calls=False)

    async def run(kind: Any, is_streamed: bool, question: str, **options: Any) -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            agent = Agent(name="a", instructions="Answer.", model=kind(model="m", openai_client=client), **options)
            if not is_streamed:
                return (await Runner.run(agent, question)).final_output
            result = Runner.run_streamed(agent, question)
            async for _ in result.stream_events():
                pass
            return result.final_output

    def output(kind: Any, is_streamed: bool) -> Callable[[str], Any]:
        options = {"output_type": Voyage, "model_settings": settings}
        return lambda question: asyncio.run(run(kind, is_streamed, question, **options)).model_dump()

    def call(kind: Any, is_streamed: bool) -> Callable[[str], Any]:
        options = {"model_settings": forced, "tool_use_behavior": "stop_on_first_tool"}
        return lambda question: asyncio.run(run(kind, is_streamed, question, tools=[function_tool(book)], **options))

    kinds = {"chats": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    return {
        f"{name}, {what}{', streamed' if is_streamed else ''}": make(kind, is_streamed)
        for name, kind in kinds.items()
        for what, make in (("schema", output), ("call", call))
        for is_streamed in (False, True)
    }


def with_llama_index(url: str) -> Calls:
    """Answers by schema, forced calls and texts, whole and streamed."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    server: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
    kind = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
    model = OpenAILike(model="m", context_window=4000, **server, **kind, **LIMITS)
    completions = OpenAILike(model="m", temperature=0.0, max_tokens=150, is_chat_model=False, **server)
    tool = FunctionTool.from_defaults(book, fn_schema=Booking)

    def forced_call(question: str) -> Any:
        answer = model.chat_with_tools(
            [tool], user_msg=question, tool_required=True, allow_parallel_tool_calls=False, strict=True
        )
        return [call.tool_kwargs for call in model.get_tool_calls_from_response(answer)]

    def structured(question: str) -> Any:
        template = PromptTemplate("{question}")
        return model.structured_predict(Voyage, template, question=question).model_dump()

    return {
        "schema": structured,
        "structured model": lambda question: (
            model.as_structured_llm(Voyage).chat([ChatMessage(role="user", content=question)]).raw.model_dump()
        ),
        "forced call": forced_call,
        "text, streamed": lambda question: [
            part.message.content
            for part in model.stream_chat([ChatMessage(role="user", content=question)], max_tokens=150)
        ][-1],
        "completion, streamed": lambda question: [part.text for part in completions.stream_complete(question)][-1],
    }


LIBRARIES: dict[str, Callable[[str], Calls]] = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "litellm": with_litellm,
    "instructor": with_instructor,
    "langchain": with_langchain,
    "pydantic-ai": with_pydantic_ai,
    "openai-agents": with_openai_agents,
    "llama-index": with_llama_index,
}


def main() -> None:
    """Run the calls."""
    url, library, count, at_once, *names = sys.argv[1:]
    calls = LIBRARIES[library](url)
    names = names or list(calls)

    def run(number: int) -> list[Any]:
        name, question = names[number % len(names)], number // len(names) % NUM_QUESTIONS
        try:
            result = calls[name](f"How is voyage {question} to {'the far ' * question}north?")
        except Exception as error:  # noqa: BLE001 - reported in the result
            result = f"{type(error).__name__}: {str(error)[:600]}"
        return [f"{name}, question {question}", result]

    threading.stack_size(2**20)
    with ThreadPoolExecutor(int(at_once)) as pool:
        print(json.dumps(list(pool.map(run, range(int(count))))))


if __name__ == "__main__":
    main()
