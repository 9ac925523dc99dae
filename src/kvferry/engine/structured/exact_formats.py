"""Formats of JSON Schema as patterns, where llguidance's own permit what is not valid: February 29 of any year, and
leap seconds at any minute."""

from __future__ import annotations

from typing import Any

from kvferry.engine.structured.schema_paths import subschemas

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+-]{_CLOCK})"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}


def with_exact_formats(schema: Any) -> None:
    """Replace these formats in the schema, in place. Leap seconds, and fractions beyond nanoseconds, are not
    permitted."""
    for _, part in subschemas(schema):
        pattern = _PATTERNS.get(part["format"]) if isinstance(part.get("format"), str) else None
        if pattern is None:
            continue
        del part["format"]
        if "pattern" in part:
            part["allOf"] = [*part.get("allOf", ()), {"pattern": pattern}]
        else:
            part["pattern"] = pattern
