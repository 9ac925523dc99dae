"""Metrics of several processes as one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvferry.router.edge.summed import summed


def values(text: bytes) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


FIRST = b"""# HELP requests_total r
# TYPE requests_total counter
requests_total{path="/a"} 2.0
requests_total{path="/b"} 1.0
# HELP kvferry_router_instance_up u
# TYPE kvferry_router_instance_up gauge
kvferry_router_instance_up{instance="d"} 1.0
"""
SECOND = FIRST.replace(b'{path="/a"} 2.0', b'{path="/a"} 5.0').replace(b'{instance="d"} 1.0', b'{instance="d"} 0.0')


def test_counters_are_added_by_label_and_states_are_the_worst() -> None:
    merged = values(summed([FIRST, SECOND]))
    assert merged["requests_total[('path', '/a')]"] == 7.0
    assert merged["requests_total[('path', '/b')]"] == 2.0
    assert merged["kvferry_router_instance_up[('instance', 'd')]"] == 0.0


def test_one_text_stays_as_it_is_and_none_is_empty() -> None:
    assert values(summed([FIRST])) == values(FIRST)
    assert summed([]) == b""


def test_a_threshold_is_the_mean_and_a_creation_the_first() -> None:
    texts = [
        b"# TYPE kvferry_router_disaggregate_from_tokens gauge\nkvferry_router_disaggregate_from_tokens %d\n"
        b"# TYPE x gauge\nx_created %d\n" % (number, number)
        for number in (100, 300)
    ]
    merged = values(summed(texts))
    assert merged["kvferry_router_disaggregate_from_tokens[]"] == 200.0
