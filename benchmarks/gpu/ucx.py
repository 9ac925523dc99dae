"""UCX's report of its transports, with UCX_PROTO_INFO=y and UCX_LOG_LEVEL=info."""

from __future__ import annotations

import re

ENVIRONMENT = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
_PREFIX = re.compile(r"^\[[^\]]*\]\s*\[[^\]]*\]\s*")
_TITLE = re.compile(r"\|\s*remote memory read\b.*\|")
_ROW = re.compile(r"\|\s*[\d.inf]+\s*\|\s*(?P<way>[^|]+?)\s*\|\s*(?P<lanes>[^|]+?)\s*\|")


def ways_to_read(log: str) -> list[str]:
    """For each kind of remote read that UCX prepared, its lanes, such as `cuda_ipc/cuda` or `tcp/lo`; no duplicates,
    in the order of the log."""
    lanes: dict[str, None] = {}
    is_read = False
    for line in log.splitlines():
        text = _PREFIX.sub("", line).strip()
        if not text.startswith("|"):
            continue
        if row := _ROW.match(text):
            if is_read:
                lanes[row["lanes"]] = None
        elif "|" not in text.strip("|"):  # a row of one cell is a title
            is_read = is_read and not text.strip("| ").startswith(("remote memory", "active message", "tag"))
            is_read = is_read or _TITLE.match(text) is not None
    return list(lanes)


def is_tcp(lanes: list[str]) -> bool:
    """True if all transports are TCP, that is, through host memory and the network stack."""
    return bool(lanes) and all(lane.split("/")[0].strip() == "tcp" for lane in lanes)
