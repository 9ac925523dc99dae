#!/usr/bin/env bash
# Install unmodified clients that tests run: each in an environment of its own, as they ask for other versions of common
# libraries than kvferry does. Usage: scripts/install_clients.sh [CLIENT…]; all of them unless some are named.
# May be run again: with everything there it does nothing. About 2 GB in all.
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A requirements=(
	[litellm]="litellm==1.106.2 mcp==2.3.0"
	[aiperf]="aiperf==0.13.0"
	[llamaindex]="llama-index-llms-openai-like==0.8.1"
	[agents]="openai-agents==0.24.0 pydantic-ai-slim[openai]==2.38.0 instructor==1.17.0 langchain-openai==1.7.4"
)
[ $# -gt 0 ] || set -- "${!requirements[@]}"
for client in "$@"; do
	read -ra packages <<<"${requirements[$client]:?"no such client: $client"}"
	environment=.venv-$client stamp=.venv-$client/.installed-$(cksum <<<"${packages[*]}" | cut -d ' ' -f 1)
	[ -e "$stamp" ] && continue
	rm -rf "$environment"
	"${PYTHON:-$(scripts/find_python)}" -m venv "$environment"
	"$environment/bin/pip" --disable-pip-version-check install --quiet "${packages[@]}"
	touch "$stamp"
done
