"""Which test files are started first: the long ones, so that the processes that share the files out end together.

A file that waits (for instances that start, leases that end) is followed by one that computes, so that neither all wait
nor all compute at once. `make test` ends with its slowest tests: a file with some of them belongs here.
"""

from __future__ import annotations

from pathlib import Path

_TESTS = Path(__file__).parents[1]
LONG_FILES = (
    "end_to_end/test_fleet_ray.py",
    "end_to_end/test_ranks_on_ray.py",
    "end_to_end/test_api_schema.py",
    "end_to_end/test_key_proxy.py",
    "end_to_end/test_killed_decode.py",
    "end_to_end/test_many_schemas.py",
    "end_to_end/test_fuzz.py",
    "end_to_end/test_random_faults.py",
    "end_to_end/test_media.py",
    "end_to_end/test_stopped.py",
    "fleet/backends/local/test_fork_server.py",
    "cli/serving/test_serve.py",
    "engine/test_exactness.py",
    "end_to_end/test_demo.py",
    "engine/test_tensor_parallel.py",
    "end_to_end/test_slow_clients.py",
    "cli/cache/test_warm.py",
    "end_to_end/test_walk.py",
    "engine/model/test_families.py",
    "end_to_end/test_faults.py",
    "engine/test_hand_off_exactness.py",
    "engine/test_fault_injection.py",
    "engine/test_kv_keys.py",
    "engine/test_store_product.py",
    "engine/test_rank_loss.py",
    "engine/test_store_exactness.py",
    "end_to_end/test_failure_table.py",
    "engine/test_hand_off_bfloat16.py",
    "router/test_siblings.py",
    "engine/model/test_batch_invariance.py",
    "router/request/test_delivery.py",
    "engine/test_cache_beside_hand_off.py",
    "transport/fabric/test_nixl_agent.py",
)
_PLACES = {_TESTS / name: place for place, name in enumerate(LONG_FILES)}
_lost = [path for path in _PLACES if not path.is_file()]
assert not _lost, f"these test files are no longer there: {_lost}"


def starting_place(path: Path) -> int:
    """Of a test file in the order of starting; all that are not long come last, as they were found."""
    return _PLACES.get(path, len(_PLACES))
