"""The values that differ between two deployments of one fleet: written into manifests directly, or into a chart's
`values.yaml`, with an expression of Helm's where they are used."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

_MARK = "helm-expression-{}-"
_MARKED = re.compile(r"helm-expression-(\d+)-")
_QUOTED = re.compile(r'"(helm-expression-\d+-)"')


class _ManifestDumper(yaml.SafeDumper):
    """Writes repeated values in full instead of as references, and texts with several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ManifestDumper.add_representer(str, _represent_text)


class Values:
    """`chart`: write expressions; `tree` then has the values of `values.yaml`."""

    def __init__(self, *, chart: bool = False) -> None:
        self.chart = chart
        self.tree: dict[str, Any] = {}
        self._expressions: list[str] = []

    def value(self, path: str, value: Any) -> Any:
        """A value that users may change; `path` names it in `values.yaml`, with a dot between levels."""
        if not self.chart:
            return value
        *tables, name = path.split(".")
        table = self.tree
        for key in tables:
            table = table.setdefault(key, {})
        table[name] = value
        return self._expression(f"toJson .Values.{path}")

    def secret(self, path: str, value: str) -> str:
        """A value that users must set: the chart does not contain it, and fails without it."""
        if not self.chart:
            return value
        self.tree[path] = ""
        return self._expression(f'required "set {path}" .Values.{path} | toJson')

    def namespace(self, name: str) -> str:
        """The namespace of all objects: for a chart, where it is installed."""
        return self._expression("toJson .Release.Namespace") if self.chart else name

    def quoted_namespace(self, name: str) -> str:
        """A namespace as a quoted string within another text."""
        return self.namespace(name) if self.chart else json.dumps(name)

    def within_text(self, name: str) -> str:
        """The namespace within another text, without quotes."""
        return self._expression(".Release.Namespace") if self.chart else name

    def within(self, text: str) -> str:
        """A text of JSON or TOML in which values are strings; they get their own types."""
        return _QUOTED.sub(r"\1", text)

    def _expression(self, text: str) -> str:
        self._expressions.append(text)
        return _MARK.format(len(self._expressions) - 1)

    def write(self, objects: list[dict[str, Any]]) -> str:
        """The objects as YAML."""
        text = yaml.dump_all(objects, Dumper=_ManifestDumper, sort_keys=False, width=120, explicit_start=True)
        return _MARKED.sub(lambda match: "{{ " + self._expressions[int(match[1])] + " }}", text)


def write_values(tree: dict[str, Any]) -> str:
    """`values.yaml`."""
    text: str = yaml.dump(tree, Dumper=_ManifestDumper, sort_keys=False, width=120)
    return text
