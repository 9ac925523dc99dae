"""Schemas of others, which `make install-schemas` fetches."""

from __future__ import annotations

from pathlib import Path

SCHEMAS = Path(__file__).parents[2] / "build" / "schemas"
"""`suite` has the JSON Schema Test Suite, `store` has SchemaStore's schemas."""

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
"""The drafts of the suite, by its folders' names."""


def is_installed() -> bool:
    """True if they were fetched."""
    return (SCHEMAS / ".complete").is_file()
