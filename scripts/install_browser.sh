#!/usr/bin/env bash
# Install what the tests of the page need: Debian's Chromium with its driver, and axe-core from npm (.browser/axe.min.js);
# and, for the board of Perses, its types and a compiler that checks them (.browser/perses).
# May be run again: with everything there it does nothing. Needs Debian or Ubuntu, npm, and root or sudo.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

if ! command -v chromium > /dev/null || ! command -v chromedriver > /dev/null; then
	as_root apt-get update -qq
	as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver > /dev/null
fi
if [[ ! -f .browser/axe.min.js ]]; then
	folder=$(mktemp -d)
	trap 'rm -rf "$folder"' EXIT
	(cd "$folder" && npm pack --silent axe-core@4.14.1 > /dev/null && tar -xzf axe-core-*.tgz)
	mkdir -p .browser
	cp "$folder/package/axe.min.js" .browser/axe.min.js
fi
if [[ ! -x .browser/perses/node_modules/.bin/tsc ]]; then
	mkdir -p .browser/perses
	npm install --silent --no-audit --no-fund --prefix .browser/perses typescript@5.9 @perses-dev/core@0.52.0 > /dev/null
fi
