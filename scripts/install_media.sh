#!/usr/bin/env bash
# Install NIXL, the Mooncake Transfer Engine and LMCache's server into an environment, for tests and benchmarks.
# Usage: scripts/install_media.sh ENVIRONMENT
# Without dependencies: what they ask for beyond kvferry's own is CUDA, which a machine without a GPU has no use for.
set -euo pipefail
environment=$1

libraries=(libibverbs1 librdmacm1 libnuma1 libcurl4 libunwind8 liburing2 libgoogle-glog0v6 libjsoncpp25 libaio1)
if ! dpkg --status "${libraries[@]}" > /dev/null 2>&1; then
	if [ "$(id -u)" = 0 ]; then
		apt-get update -qq
		apt-get install -qq -y --no-install-recommends "${libraries[@]}" > /dev/null
	else
		echo "Mooncake needs libraries of Debian; as root: apt-get install ${libraries[*]}" >&2
	fi
fi
"$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps \
	nixl==1.5.1 nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1 \
	lmcache==0.5.6 numba==0.68.1 llvmlite==0.50.0 py-cpuinfo nvtx cachetools
