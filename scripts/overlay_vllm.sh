#!/usr/bin/env bash
# Makes a folder with the Python of a vLLM release that has no build for CPUs, over the compiled parts of one that has,
# to test the adapter with it where there is no GPU.
#
#   scripts/overlay_vllm.sh FOLDER VLLM_VERSION [VENV]
#
# Afterwards `PYTHONPATH=FOLDER VENV/bin/python` has that vLLM. VENV (default .venv-vllm) is what
# scripts/install_vllm_cpu.sh made. This is no release of anybody's: it works as long as the compiled parts of the two
# releases are called alike. Takes about 100 MB, and 450 MB while it is made; nothing when it is done already.
set -euo pipefail

case "${1:-}" in
'' | -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" && exit ;;
esac
folder=$1 version=${2:?which version of vLLM? see --help} venv=${3:-.venv-vllm}
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
stamp=$folder/.kvferry-overlay
wanted="vllm $version over $base $(sha256sum "$0")"
if [[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; then
    exit
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$venv/bin/pip" --quiet --disable-pip-version-check)
echo "overlay_vllm: putting the Python of vLLM $version over the compiled parts of $base (some 400 MB)" >&2
"${pip[@]}" download --no-deps --dest "$work" "vllm==$version"
rm -rf "$folder"
"$venv/bin/python" - "$work"/vllm-*.whl "$site" "$folder" <<'PYTHON'
import sys, zipfile
from pathlib import Path

wheel, site, folder = map(Path, sys.argv[1:])
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith("vllm/") and name.endswith((".py", ".json", ".jinja")):
            archive.extract(name, folder)
for library in site.glob("vllm/**/*.so"):
    place = folder / library.relative_to(site)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(library)
PYTHON
mkdir "$folder/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$folder/vllm-$version+cpu.dist-info/METADATA"
# Needed by 0.33 at import, and by no vLLM before it.
"${pip[@]}" install --no-deps --target "$folder" orjson
PYTHONPATH=$folder "$venv/bin/python" -c 'import vllm, sys; sys.exit(vllm.__version__.split("+")[0] != sys.argv[1])' "$version"
echo "$wanted" >"$stamp"
