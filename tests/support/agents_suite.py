"""Structured answers and tool calls by unmodified libraries: openai-agents, pydantic-ai, instructor and langchain.
Prints one line: a JSON object with the result of each call by its name, or the error's class and text.

    python agents_suite.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

QUESTION = "How is the weather in Bern?"
LIMITS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Rome"]
    days: int = Field(ge=1, le=9)


def get_weather(city: Literal["Bern", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"{city} {days}"


def with_instructor(base: str) -> dict[str, Callable[[], Any]]:
    """By forced calls, by schema, and in parts."""
    import instructor
    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="none", max_retries=0, timeout=90)
    messages = [{"role": "user", "content": QUESTION}]

    def create(mode: Any) -> Any:
        made = instructor.from_openai(client, mode=mode).chat.completions
        return made.create(model="m", response_model=Weather, messages=messages, max_retries=0, **LIMITS).model_dump()

    def partial() -> Any:
        made = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions
        parts = made.create_partial(model="m", response_model=Weather, messages=messages, max_retries=0, **LIMITS)
        return [part.model_dump() for part in parts][-1]

    return {
        "instructor, tools": lambda: create(instructor.Mode.TOOLS),
        "instructor, strict tools": lambda: create(instructor.Mode.TOOLS_STRICT),
        "instructor, schema": lambda: create(instructor.Mode.JSON_SCHEMA),
        "instructor, partial": partial,
    }


def with_langchain(base: str) -> dict[str, Callable[[], Any]]:
    """Both methods of structured output, forced calls, and a stream of them."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=base, api_key="none", max_retries=0, timeout=90, **LIMITS)
    forced = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)

    def call(message: Any) -> Any:
        (found,) = message.tool_calls
        return [found["name"], found["args"]]

    def streamed() -> Any:
        whole = None
        for chunk in forced.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        return call(whole)

    return {
        "langchain, schema": lambda: (
            model.with_structured_output(Weather, method="json_schema").invoke(QUESTION).model_dump()
        ),
        "langchain, calls": lambda: (
            model.with_structured_output(Weather, method="function_calling").invoke(QUESTION).model_dump()
        ),
        "langchain, forced call": lambda: call(forced.invoke(QUESTION)),
        "langchain, streamed call": streamed,
        "langchain, text": lambda: len(model.invoke(QUESTION).content) > 0,
    }


def with_pydantic_ai(base: str) -> dict[str, Callable[[], Any]]:
    """An answer by a forced call, by schema, and streamed."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=base, api_key="none"))

    def run(output: Any) -> Any:
        return Agent(model, output_type=output, retries=0, model_settings=LIMITS).run_sync(QUESTION).output.model_dump()

    async def streamed() -> Any:
        agent = Agent(model, output_type=Weather, retries=0, model_settings=LIMITS)
        async with agent.run_stream(QUESTION) as stream:
            return (await stream.get_output()).model_dump()

    return {
        "pydantic-ai, call": lambda: run(Weather),
        "pydantic-ai, schema": lambda: run(NativeOutput(Weather)),
        "pydantic-ai, streamed": lambda: asyncio.run(streamed()),
    }


def with_openai_agents(base: str) -> dict[str, Callable[[], Any]]:
    """Over chats and over Responses: an output by schema, and a forced call of a tool."""
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
    settings = ModelSettings(temperature=0.0, max_tokens=200)
    forced = ModelSettings(temperature=0.0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)

    async def run(kind: Any, **options: Any) -> Any:
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=90) as client:
            agent = Agent(name="a", instructions="Answer.", model=kind(model="m", openai_client=client), **options)
            return (await Runner.run(agent, QUESTION)).final_output

    def output(kind: Any) -> Any:
        return asyncio.run(run(kind, output_type=Weather, model_settings=settings)).model_dump()

    def call(kind: Any) -> Any:
        tools = [function_tool(get_weather)]
        return asyncio.run(run(kind, tools=tools, model_settings=forced, tool_use_behavior="stop_on_first_tool"))

    return {
        "openai-agents, chats, schema": lambda: output(OpenAIChatCompletionsModel),
        "openai-agents, chats, call": lambda: call(OpenAIChatCompletionsModel),
        "openai-agents, responses, schema": lambda: output(OpenAIResponsesModel),
        "openai-agents, responses, call": lambda: call(OpenAIResponsesModel),
    }


LIBRARIES = (with_instructor, with_langchain, with_pydantic_ai, with_openai_agents)


def main() -> None:
    """Run all calls."""
    results: dict[str, Any] = {}
    for library in LIBRARIES:
        for name, call in library(f"{sys.argv[1]}/v1").items():
            try:
                results[name] = call()
            except Exception as error:  # noqa: BLE001 - told in the result
                results[name] = f"{type(error).__name__}: {str(error)[:600]}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
