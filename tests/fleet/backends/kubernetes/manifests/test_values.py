"""Values of manifests: written as they are, or as expressions of a chart."""

from __future__ import annotations

import yaml

from kvferry.fleet.backends.kubernetes.manifests.values import Values, write_values


def test_manifests_have_the_values_themselves() -> None:
    values = Values()
    objects = [{"n": values.value("a.b", 3), "s": values.secret("key", "x"), "ns": values.namespace("here")}]
    assert [*yaml.safe_load_all(values.write(objects))] == [{"n": 3, "s": "x", "ns": "here"}]
    assert values.tree == {}
    assert values.quoted_namespace('a"b') == '"a\\"b"'


def test_charts_have_expressions_and_their_values_apart() -> None:
    values = Values(chart=True)
    objects = [{"n": values.value("prefill.count", 3), "s": values.secret("adminKey", "x")}]
    text = values.write(objects)
    assert "n: {{ toJson .Values.prefill.count }}" in text
    assert '{{ required "set adminKey" .Values.adminKey | toJson }}' in text
    assert values.tree == {"prefill": {"count": 3}, "adminKey": ""}, "a chart contains no secret"


def test_a_value_within_a_text_has_its_own_type() -> None:
    values = Values(chart=True)
    count = values.value("count", 3)
    text = values.within(f'{{"count": "{count}", "name": "x"}}')
    assert values.write([{"json": text}]).strip().endswith("""'{"count": {{ toJson .Values.count }}, "name": "x"}'""")


def test_many_values_keep_their_places() -> None:
    values = Values(chart=True)
    text = values.write([{f"k{number}": values.value(f"v{number}", number) for number in range(12)}])
    for number in range(12):
        assert f"k{number}: {{{{ toJson .Values.v{number} }}}}\n" in text


def test_texts_of_several_lines_are_blocks_and_nothing_is_a_reference() -> None:
    same = {"a": [1, 2]}
    text = write_values({"first": same, "second": same, "script": "one\ntwo\n"})
    assert "&" not in text
    assert "script: |\n  one\n  two\n" in text
    assert yaml.safe_load(text)["second"] == same
