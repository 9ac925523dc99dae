#!/usr/bin/env bash
# Install unmodified clients that tests run: each in an environment of its own, as they ask for other versions of common
# libraries than kvferry does. Usage: scripts/install_clients.sh [CLIENT…]; all of them unless some are named.
# May be run again: with everything there it does nothing. About 1.6 GB in all.
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A versions=([litellm]=1.106.2 [aiperf]=0.13.0)
[ $# -gt 0 ] || set -- "${!versions[@]}"
for client in "$@"; do
	version=${versions[$client]:?"no such client: $client"}
	environment=.venv-$client stamp=.venv-$client/.installed-$version
	[ -e "$stamp" ] && continue
	rm -rf "$environment"
	"${PYTHON:-$(scripts/find_python)}" -m venv "$environment"
	"$environment/bin/pip" --disable-pip-version-check install --quiet "$client==$version"
	touch "$stamp"
done
