#!/usr/bin/env bash
# Install Triton for `KVFERRY_GPU=fake make gpu` and its tests: its interpreter, and NVIDIA's assembler that comes with it.
# In a folder of its own, since it is large (290 MB, 1 GB unpacked) and PyTorch's build for CPUs does without. May be run
# again: with everything there it does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.9.0
stamp=.venv-triton/.installed-$version
[ -e "$stamp" ] && exit
rm -rf .venv-triton
"${PYTHON:-$(scripts/find_python)}" -m pip --disable-pip-version-check install --quiet --no-deps \
	--target .venv-triton "triton==$version"
touch "$stamp"
