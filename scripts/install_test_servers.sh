#!/usr/bin/env bash
# Install the servers that tests start for themselves: a key-value server (Valkey where Debian has it, else Redis).
# May be run again: with everything there it does nothing. Needs Debian or Ubuntu, and root or sudo.
set -euo pipefail

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

if command -v valkey-server > /dev/null || command -v redis-server > /dev/null; then
	exit 0
fi
as_root apt-get update -qq
package=redis-server
if apt-cache show valkey-server > /dev/null 2>&1; then
	package=valkey-server
fi
# RUNLEVEL=1: the package is not to start a server of its own.
as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends "$package" > /dev/null
