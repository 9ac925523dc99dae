"""The helps of the metrics in which connectors and stores of kvferry's show their statistics."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"(?:(?P<child>\d+)_)?(?:tier(?P<tier>\d)_)?")

_HELPS = {
    # Hand-offs.
    "num_produced": "Hand-offs that are being made or are under lease.",
    "fetches": "Hand-offs that this instance has begun to fetch.",
    "num_loading": "Loads of KV that are running.",
    "taken": "Hand-offs that arrived completely and are used.",
    "taken_bytes": "Bytes of the hand-offs that arrived, by transport.",
    "taken_seconds": "Seconds that the hand-offs that arrived took.",
    "failed": "Hand-offs that could not be fetched, by kind of error.",
    "lost": "Hand-offs that could not be fetched, by kind of error.",
    "transfer_errors": "Errors on the thread that moves KV.",
    "num_keys": "Keys of hand-offs that the lookup buffer has.",
    "held_bytes": "Bytes of KV that are held for other instances.",
    "open_connections": "Connections to other instances that are open.",
    # Stores.
    "stored_blocks": "Blocks that were stored.",
    "present_blocks": "Blocks that were to be stored and were there already.",
    "loaded_blocks": "Blocks that were loaded.",
    "missing_blocks": "Blocks that were asked for and are not there.",
    "corrupt_blocks": "Blocks whose checksum was wrong, and which were not used.",
    "dropped_blocks": "Blocks that were not stored, because there was no room or the store was too slow.",
    "evicted_blocks": "Blocks that were evicted to make room.",
    "promoted_blocks": "Blocks that were copied to a faster tier after they had been found in a slower one.",
    "prefetched_blocks": "Blocks of queued requests that were copied to the first tier.",
    "read_bytes": "Bytes that were read.",
    "written_bytes": "Bytes that were written.",
    "kept_bytes": "Bytes that are kept now.",
    "pinned_blocks": "Blocks that are protected from eviction.",
    "moving_bytes": "Bytes that are being copied between tiers.",
    "dirty_blocks": "Blocks that slower tiers do not have yet.",
    "healthy": "1 if the tier answers, 0 if it is left alone for a while.",
    "failures": "Operations that failed.",
    "late": "Operations that missed their deadline.",
    "writer_waiting_bytes": "Bytes that wait to be written.",
    "writer_dropped_blocks": "Blocks that were not written, because too many waited.",
    "not_loaded_blocks": "Blocks that were present and were computed again instead of loaded.",
    "prefill_tokens_per_s": "Prompt tokens that the model computes in a second, as measured.",
    "load_latency_s": "Seconds to the first byte of a load, as measured.",
    "load_bytes_per_s": "Bytes that a load brings in a second, as measured.",
    "load_decisions_load": "Requests of which all stored blocks were loaded.",
    "load_decisions_prefix": "Requests of which only the blocks in faster tiers were loaded.",
    "load_decisions_meet": "Requests that were loaded from the back while they were computed from the front.",
    "load_decisions_recompute": "Requests that were computed although blocks were stored.",
}


def connector_help(name: str) -> str:
    """One sentence about a statistic. In a `MultiConnector` its name begins with the number of the connector, and that
    of a tier with the tier."""
    prefix = _PREFIX.match(name)
    assert prefix is not None
    statistic = name[prefix.end() :]
    text = _HELPS.get(statistic)
    if text is None and statistic.startswith("ended_"):
        text = f"Hand-offs whose keys ended at the producer, for the reason {statistic.removeprefix('ended_')!r}."
    if text is None:
        text = f"Statistic {statistic!r} of the connector, which describes it."
    where = [f"tier {prefix['tier']}"] if prefix["tier"] else []
    where += [f"connector {prefix['child']} of several"] if prefix["child"] else []
    return f"{text[:-1]} ({', '.join(where)})." if where else text
