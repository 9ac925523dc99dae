#!/usr/bin/env bash
# Makes a virtual environment with SGLang on CPUs in it, for tests of its servers behind kvferry's router and fleet.
#
#   scripts/install_sglang_cpu.sh FOLDER [SGLANG_VERSION] [TORCH_VERSION]
#
# Afterwards FOLDER/bin/python -m sglang.launch_server serves on a machine without an accelerator (flags:
# docs/stacks.md). kvferry is not in it: it starts these servers, and speaks HTTP with them.
# Takes about 3.5 GB and some minutes; nothing when it is done already. Everything comes from PyPI.
# Needs Python 3.11 or newer (PYTHON=… names one).
set -euo pipefail

case "${1:-}" in
'' | -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" && exit ;;
esac
folder=$1 version=${2:-0.5.23} torch=${3:-2.13.0}
checkout=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$("$checkout/scripts/find_python")}
on_cpu=("$checkout/scripts/sglang_on_cpu.py" "$checkout/scripts/stand_ins.py")

stamp=$folder/.kvferry-installed
wanted="sglang $version torch $torch $(cat "$0" "${on_cpu[@]}" | sha256sum)"
if [[ -x $folder/bin/python && $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; then
    exit
fi

[[ -x $folder/bin/python ]] || "$python" -m venv "$folder"
pip=("$folder/bin/pip" --quiet --disable-pip-version-check)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# SGLang asks for kernels and libraries of CUDA, and for torchvision and torchaudio, which have no build for this torch
# on PyPI. `sglang_on_cpu.py` stands in for those that it imports all the same. Others are tools and clients that a
# server of text models does not import.
install_sglang() {
    echo "install_sglang_cpu: installing SGLang $version for CPUs into $folder (some minutes)" >&2
    "${pip[@]}" install "torch==$torch"
    "${pip[@]}" download --no-deps --dest "$work" "sglang==$version"
    local wheel
    wheel=$(echo "$work"/sglang-*.whl)
    "$folder/bin/python" - "$wheel" >"$work/requirements.txt" <<'PYTHON'
import re, sys, zipfile

CUDA = {"cuda-python", "flash-attn-4", "flashinfer_python", "humming-kernels", "kernels", "nvidia-cutlass-dsl",
        "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm",
        "sgl-flash-mla", "sglang-kernel", "tilelang", "torch_memory_saver"}
NOT_FOR_CPUS = {"torch", "torchaudio", "torchcodec", "torchvision", "timm", "tml-renderers"}
NOT_IMPORTED = {"blobfile", "build", "deepseek-recipe", "modelscope", "py-spy", "smg-grpc-servicer"}
with zipfile.ZipFile(sys.argv[1]) as archive:
    [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(path).decode().splitlines()
for line in lines:
    if line.startswith("Requires-Dist:") and "extra ==" not in line:
        requirement = line.partition(":")[2].strip()
        if re.split(r"[ ;=<>!~\[]", requirement)[0] not in CUDA | NOT_FOR_CPUS | NOT_IMPORTED:
            print(requirement)
PYTHON
    "${pip[@]}" install --requirement "$work/requirements.txt"
    "${pip[@]}" install --no-deps "$wheel"
}

installed=$("$folder/bin/python" -c 'from importlib.metadata import version; print(version("sglang"))' 2>/dev/null || true)
[[ $installed == "$version" ]] || install_sglang
"$checkout/scripts/install_media.sh" "$folder" # the Mooncake Transfer Engine, which moves the KV
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "${on_cpu[@]}" "$site/"
mkdir -p "$site/sglang_on_cpu_models"
touch "$site/sglang_on_cpu_models/__init__.py"
echo 'from sglang.srt.models.llama import EntryClass  # noqa: F401' >"$site/sglang_on_cpu_models/llama.py"
echo 'import sglang_on_cpu' >"$site/sglang_on_cpu.pth"
"$folder/bin/python" -m compileall -q "$site/sglang/srt" "$site/sglang/kernels" >/dev/null || true
"$folder/bin/python" -c 'import sglang.srt.server_args' 2>"$work/errors" || { cat "$work/errors" >&2 && exit 1; }
echo "$wanted" >"$stamp"
echo "install_sglang_cpu: SGLang $version is ready: $folder/bin/python -m sglang.launch_server" >&2
