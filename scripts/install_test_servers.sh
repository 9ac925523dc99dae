#!/usr/bin/env bash
# Install what tests start for themselves: a key-value server (Valkey where Debian has it, else Redis), and the shells whose
# completion is tested.
# May be run again: with everything there it does nothing. Needs Debian or Ubuntu, and root or sudo.
set -euo pipefail

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

packages=()
for shell in zsh fish; do
	command -v "$shell" > /dev/null || packages+=("$shell")
done
if ! command -v valkey-server > /dev/null && ! command -v redis-server > /dev/null; then
	as_root apt-get update -qq
	if apt-cache show valkey-server > /dev/null 2>&1; then packages+=(valkey-server); else packages+=(redis-server); fi
elif ((${#packages[@]})); then
	as_root apt-get update -qq
fi
if ((${#packages[@]})); then
	# RUNLEVEL=1: no package is to start a server of its own.
	as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends "${packages[@]}" > /dev/null
fi
