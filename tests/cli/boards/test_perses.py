"""The board of Perses: every panel is placed once."""

from __future__ import annotations

from kvferry.cli.boards.panels import ROWS
from kvferry.cli.boards.perses import dashboard


def test_every_panel_is_placed_and_asks_what_the_board_asks() -> None:
    spec = dashboard()["spec"]
    references = [item["content"]["$ref"] for layout in spec["layouts"] for item in layout["spec"]["items"]]
    assert references == [f"#/spec/panels/panel{number}" for number in range(len(spec["panels"]))]
    expected = [panel for row in ROWS for panel in row.panels]
    for panel, source in zip(spec["panels"].values(), expected, strict=True):
        assert panel["spec"]["display"]["name"] == source.title
        queries = [query["spec"]["plugin"]["spec"]["query"] for query in panel["spec"]["queries"]]
        assert queries == [query.expression for query in source.queries]


def test_rows_keep_within_their_grid() -> None:
    for layout in dashboard()["spec"]["layouts"]:
        places = [(item["x"], item["y"]) for item in layout["spec"]["items"]]
        assert len(set(places)) == len(places)
        assert all(item["x"] + item["width"] <= 24 for item in layout["spec"]["items"])
