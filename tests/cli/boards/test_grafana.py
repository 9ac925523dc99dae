"""The board of Grafana: every panel once, none over another."""

from __future__ import annotations

from kvferry.cli.boards.grafana import dashboard
from kvferry.cli.boards.panels import ROWS


def test_every_panel_is_there_with_its_queries() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    expected = [panel for row in ROWS for panel in row.panels]
    assert [panel["title"] for panel in panels] == [panel.title for panel in expected]
    for panel, source in zip(panels, expected, strict=True):
        assert [target["expr"] for target in panel["targets"]] == [query.expression for query in source.queries]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(panels) + len(ROWS)


def test_no_panel_lies_over_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
