"""How many examples hypothesis tries: a third under `make test`, all of them where CI and `make test-all` run."""

from __future__ import annotations

import os

ALL = "KVFERRY_ALL_EXAMPLES"


def examples(number: int) -> int:
    """`number`, or a third of it."""
    return number if os.environ.get(ALL) else max(10, number // 3)
