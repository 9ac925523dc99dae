"""Make `schemas/*.json` from custom resource definitions: `python make_schemas.py FILE.yaml… --source NAME@COMMIT`.

What they say about pods is left out: they repeat Kubernetes' own schemas, which the tests use in their place.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent / "schemas"


def reduced(schema: Any) -> Any:
    """Without descriptions, and with a reference for every pod template; unknown fields are refused."""
    if isinstance(schema, list):
        return [reduced(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if isinstance(properties, dict) and "containers" in properties.get("spec", {}).get("properties", {}):
        return {"$ref": "/api/_definitions.json#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
    kept = {}
    for name, value in schema.items():
        if name == "properties":
            kept[name] = {field: reduced(one) for field, one in value.items()}
        elif name != "description" and not name.startswith("x-kubernetes"):
            kept[name] = reduced(value)
    if properties and "additionalProperties" not in kept and not schema.get("x-kubernetes-preserve-unknown-fields"):
        kept["additionalProperties"] = False
    return kept


def main() -> None:
    """Write one file for each definition."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--source", required=True)
    told = parser.parse_args()
    for path in told.files:
        definition = yaml.safe_load(path.read_text())["spec"]
        kind, group = definition["names"]["kind"], definition["group"]
        for version in definition["versions"]:
            made = {
                "$comment": f"Reduced from {told.source} (Apache-2.0), {path.name}, by make_schemas.py",
                "$id": f"https://kubernetes.io/api/{kind.lower()}",
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                **reduced(version["schema"]["openAPIV3Schema"]),
            }
            made["properties"]["metadata"] = {
                "$ref": "/api/_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
            }
            (HERE / f"{group}_{version['name']}_{kind}.json").write_text(
                json.dumps(made, indent=1, sort_keys=True) + "\n"
            )


if __name__ == "__main__":
    main()
