"""Names of connectors' figures, as metrics have them: `failed_LeaseEnded` is `failed` of the kind `LeaseEnded`."""

from __future__ import annotations

import re


def split_figure(figure: str) -> tuple[str, str]:
    """A figure's name, and its kind: a class of error behind the last underscore, or what stands behind the unit."""
    found = re.fullmatch(r"(\w+)_([A-Z]\w*)|(\w+_(?:bytes|seconds))_(.+)", figure)
    if found is None:
        return figure, ""
    return found[1] or found[3], found[2] or found[4]
