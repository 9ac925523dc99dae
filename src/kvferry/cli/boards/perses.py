"""The board as a dashboard of Perses."""

from __future__ import annotations

from typing import Any

from kvferry.cli.boards.panels import ROWS, Panel, Unit

_COLUMNS, _PANEL_WIDTH, _HEIGHT = 24, 8, 8
_UNITS: dict[Unit, dict[str, Any]] = {
    "s": {"unit": "seconds"},
    "reqps": {"unit": "requests/sec"},
    "cps": {"unit": "counts/sec"},
    "short": {"unit": "decimal"},
    "percentunit": {"unit": "percent-decimal"},
    "Bps": {"unit": "bytes/sec"},
}


def dashboard() -> dict[str, Any]:
    """The dashboard's JSON, for the project `kvferry`; it asks the project's default data source."""
    panels: dict[str, Any] = {}
    layouts = []
    for row in ROWS:
        items = []
        for number, panel in enumerate(row.panels):
            name = f"panel{len(panels)}"
            panels[name] = _panel(panel)
            items.append(
                {
                    "x": number * _PANEL_WIDTH % _COLUMNS,
                    "y": number * _PANEL_WIDTH // _COLUMNS * _HEIGHT,
                    "width": _PANEL_WIDTH,
                    "height": _HEIGHT,
                    "content": {"$ref": f"#/spec/panels/{name}"},
                }
            )
        layouts.append({"kind": "Grid", "spec": {"display": {"title": row.title}, "items": items}})
    return {
        "kind": "Dashboard",
        "metadata": {"name": "kvferry", "project": "kvferry"},
        "spec": {
            "display": {"name": "kvferry"},
            "duration": "30m",
            "refreshInterval": "10s",
            "variables": [],
            "panels": panels,
            "layouts": layouts,
        },
    }


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "kind": "Panel",
        "spec": {
            "display": {"name": panel.title, "description": panel.description},
            "plugin": {
                "kind": "TimeSeriesChart",
                "spec": {"legend": {"position": "bottom"}, "yAxis": {"format": _UNITS[panel.unit], "min": 0}},
            },
            "queries": [
                {
                    "kind": "TimeSeriesQuery",
                    "spec": {
                        "plugin": {
                            "kind": "PrometheusTimeSeriesQuery",
                            "spec": {"query": query.expression, "seriesNameFormat": query.legend},
                        }
                    },
                }
                for query in panel.queries
            ],
        },
    }
