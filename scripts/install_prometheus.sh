#!/usr/bin/env bash
# Install Prometheus and promtool from Debian; without them, tests of boards and alert rules are skipped.
# May be run again: with everything there it does nothing. Needs Debian or Ubuntu, and root or sudo.
set -euo pipefail

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

if command -v prometheus > /dev/null && command -v promtool > /dev/null; then
	exit 0
fi
as_root apt-get update -qq
# RUNLEVEL=1: the package is not to start a server of its own.
as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends prometheus > /dev/null
