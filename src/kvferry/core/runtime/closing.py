"""Closing several things, each of which may raise."""

from __future__ import annotations

from collections.abc import Callable


def close_all(*closes: Callable[[], object]) -> None:
    """Call all of them in order, even after one has raised; then raise the first error."""
    errors = list[Exception]()
    for close in closes:
        try:
            close()
        except Exception as error:  # noqa: BLE001 - raised below, once nothing is left open
            errors.append(error)
    if errors:
        raise errors[0]
