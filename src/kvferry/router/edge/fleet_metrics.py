"""The metrics of all instances as one text, each sample labelled with the role and name of its instance.

The samples of a metric must be contiguous, so they are collected line by line from all instances. Lines that are not
samples are dropped, so that the text of one instance cannot make the others invalid.
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
_OWN_LABELS = re.compile(rb'(?:\A|(?<=,))(?:role|instance)="(?:[^"\\]|\\.)*",?')
_SUFFIXES = (b"_total", b"_created", b"_bucket", b"_sum", b"_count", b"_info")


async def fleet_metrics(instances: Iterable[Instance], connections: Connections, timeout_s: float) -> bytes:
    """The metrics of the instances that answer in time; `kvferry_router_instance_scraped` shows which did."""
    scraped_instances = list(instances)
    texts = await asyncio.gather(*(_scrape(instance, connections, timeout_s) for instance in scraped_instances))
    scraped = list(zip(scraped_instances, texts, strict=True))
    return await asyncio.to_thread(merge, [(instance.role, instance.name, text) for instance, text in scraped])


async def _scrape(instance: Instance, connections: Connections, timeout_s: float) -> bytes | None:
    try:
        status, text = await connections.metrics(instance, timeout_s)
    except TransferError:
        return None
    return text if status == 200 else None


def merge(texts: Iterable[tuple[str, str, bytes | None]]) -> bytes:
    """Merge the texts of instances (role, name, text) into one; text None: it did not answer."""
    heads: dict[bytes, dict[bytes, bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for role, name, text in texts:
        label = b'role="%b",instance="%b"' % (role.encode(), name.encode())
        samples.setdefault(_SCRAPED, []).append(b"%b{%b} %d" % (_SCRAPED, label, text is not None))
        for line in (text or b"").split(b"\n"):
            _add_line(line.rstrip(), label, heads, samples)
    heads[_SCRAPED] = {
        b"HELP": b"# HELP %b Whether the metrics of an instance are here (/metrics?instances=all)." % _SCRAPED,
        b"TYPE": b"# TYPE %b gauge" % _SCRAPED,
    }
    lines = [
        line for name, metric_samples in samples.items() for line in (*heads.get(name, {}).values(), *metric_samples)
    ]
    return b"\n".join(lines) + b"\n"


_SCRAPED = b"kvferry_router_instance_scraped"


def _add_line(
    line: bytes, label: bytes, heads: dict[bytes, dict[bytes, bytes]], samples: dict[bytes, list[bytes]]
) -> None:
    if comment := _COMMENT.match(line):
        heads.setdefault(comment[2], {}).setdefault(comment[1], line)
    elif sample := _SAMPLE.match(line):
        name, labels, value = sample[1], _OWN_LABELS.sub(b"", sample[2] or b"").rstrip(b","), sample[3]
        if _is_number(value):
            other_labels = b"," + labels if labels else b""
            samples.setdefault(_family(name, heads), []).append(b"%b{%b%b} %b" % (name, label, other_labels, value))


def _family(name: bytes, heads: dict[bytes, dict[bytes, bytes]]) -> bytes:
    """The metric of a sample: its name, or its name without the suffix."""
    if name in heads:
        return name
    for part in _SUFFIXES:
        if name.endswith(part) and name.removesuffix(part) in heads:
            return name.removesuffix(part)
    return name


def _is_number(value: bytes) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
