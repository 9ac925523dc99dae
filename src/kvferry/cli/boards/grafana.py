"""The board as a dashboard of Grafana (10 and newer), to be imported or provisioned."""

from __future__ import annotations

from typing import Any

from kvferry.cli.boards.panels import ROWS, Panel

_WIDTH, _PANEL_WIDTH, _HEIGHT = 24, 8, 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard's JSON. Its one variable is the data source."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for number, panel in enumerate(row.panels):
            x = number * _PANEL_WIDTH % _WIDTH
            if number and x == 0:
                y += _HEIGHT
            panels.append(_panel(len(panels) + 1, panel, x, y))
        y += _HEIGHT
    return {
        "uid": "kvferry",
        "title": "kvferry",
        "description": "Prefill and decode on different instances: answers, hand-offs and instances.",
        "tags": ["kvferry"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": _PANEL_WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }
