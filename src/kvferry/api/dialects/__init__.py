"""Anthropic's Messages API and OpenAI's Responses API as translations of chat completions.

A request is translated to a chat request, and the chat's answer, whole or streamed, to an answer of its API. Nothing
here knows a server or an engine: a router translates in front of all instances, and kvferry's engine in front of
itself.
"""
