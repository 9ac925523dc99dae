"""The contract of output parsers, for the example."""

from __future__ import annotations

from kvferry.testing.output_parser import OutputParserContract


class TestBracketCalls(OutputParserContract):
    """Two calls, with text before them, and the closing brackets within an argument."""

    parser = "bracket_calls:BracketCalls"
    answer = 'Let me see. [[get_weather {"city": "Bern]]"}]][[get_time {}]]'
    content = "Let me see. "
    calls = (("get_weather", {"city": "Bern]]"}), ("get_time", {}))
