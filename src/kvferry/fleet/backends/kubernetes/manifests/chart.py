"""A Helm chart of a fleet, made by the same code as its manifests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from kvferry import __version__
from kvferry.fleet.backends.kubernetes.manifests.pod_templates import Object
from kvferry.fleet.backends.kubernetes.manifests.values import Values, write_values
from kvferry.fleet.spec.fleet_spec import DesiredFleet


def write_chart(fleet: DesiredFleet, folder: Path, render: Callable[[Values], list[Object]]) -> list[Path]:
    """Write the objects of `render` as a chart into `folder`. Returns the files. Raises `ConfigError` and `OSError`."""
    values = Values(chart=True)
    objects = render(values)
    files = {
        "Chart.yaml": yaml.safe_dump(
            {
                "apiVersion": "v2",
                "name": fleet.name,
                "description": f"{fleet.model} served with kvferry",
                "type": "application",
                "version": "0.1.0",
                "appVersion": __version__,
            },
            sort_keys=False,
        ),
        "values.yaml": write_values(values.tree),
        "templates/fleet.yaml": values.write(objects),
    }
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]
