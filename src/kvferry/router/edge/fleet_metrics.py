"""The metrics of all instances as one text, each sample labelled with the role and name of its instance.

The samples of one metric must stand together, whichever instance they come from, so they are collected line by line.
Lines that are not samples are left out, so that one instance's text cannot damage the others'.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from kvferry.core.errors import TransferError
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import Instance

_COMMENT = re.compile(rb"# (HELP|TYPE) ([a-zA-Z_:][\w:]*)(?: .*)?\Z")
_SAMPLE = re.compile(rb'([a-zA-Z_:][\w:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*)\})? +(\S+)(?: +-?\d+)?\Z')
_OWN = re.compile(rb'(?:\A|(?<=,))(?:role|instance)="(?:[^"\\]|\\.)*",?')
_PARTS = (b"_total", b"_created", b"_bucket", b"_sum", b"_count", b"_info")


async def fleet_metrics(instances: Iterable[Instance], connections: Connections, timeout_s: float) -> bytes:
    """The metrics of those instances that answer in time; `kvferry_router_instance_scraped` shows which did."""
    asked = list(instances)
    texts = await asyncio.gather(*(_scrape(one, connections, timeout_s) for one in asked))
    found = list(zip(asked, texts, strict=True))
    return await asyncio.to_thread(merge, [(one.role, one.name, text) for one, text in found])


async def _scrape(instance: Instance, connections: Connections, timeout_s: float) -> bytes | None:
    try:
        status, text = await connections.metrics(instance, timeout_s)
    except TransferError:
        return None
    return text if status == 200 else None


def merge(texts: Iterable[tuple[str, str, bytes | None]]) -> bytes:
    """Role, name and text of each instance, as one text; text None: it did not answer."""
    heads: dict[bytes, dict[bytes, bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for role, name, text in texts:
        label = b'role="%b",instance="%b"' % (role.encode(), name.encode())
        samples.setdefault(_SCRAPED, []).append(b"%b{%b} %d" % (_SCRAPED, label, text is not None))
        for line in (text or b"").split(b"\n"):
            _take(line.rstrip(), label, heads, samples)
    heads[_SCRAPED] = {
        b"HELP": b"# HELP %b Whether the metrics of an instance are here (/metrics?instances=all)." % _SCRAPED,
        b"TYPE": b"# TYPE %b gauge" % _SCRAPED,
    }
    lines = [line for name, found in samples.items() for line in (*heads.get(name, {}).values(), *found)]
    return b"\n".join(lines) + b"\n"


_SCRAPED = b"kvferry_router_instance_scraped"


def _take(line: bytes, label: bytes, heads: dict[bytes, dict[bytes, bytes]], samples: dict[bytes, list[bytes]]) -> None:
    if comment := _COMMENT.match(line):
        heads.setdefault(comment[2], {}).setdefault(comment[1], line)
    elif sample := _SAMPLE.match(line):
        name, labels, value = sample[1], _OWN.sub(b"", sample[2] or b"").rstrip(b","), sample[3]
        if _is_number(value):
            more = b"," + labels if labels else b""
            samples.setdefault(_family(name, heads), []).append(b"%b{%b%b} %b" % (name, label, more, value))


def _family(name: bytes, heads: dict[bytes, dict[bytes, bytes]]) -> bytes:
    """The metric that a sample belongs to: its name, or its name without the suffix."""
    if name in heads:
        return name
    for part in _PARTS:
        if name.endswith(part) and name.removesuffix(part) in heads:
            return name.removesuffix(part)
    return name


def _is_number(value: bytes) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
