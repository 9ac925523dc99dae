"""A file for an issue: findings, versions, settings and the ends of logs, without secrets."""

from __future__ import annotations

import io
import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from kvferry import __version__
from kvferry.cli.doctor.finding import MARKS, Finding
from kvferry.core.errors import ConfigError
from kvferry.core.folders.state_folder import state_folder
from kvferry.core.keys import shared_token, users_token

_NAMES = re.compile(r"key|token|secret|password|credential|authorization", re.IGNORECASE)
_VARIABLES = ("KVFERRY_", "UCX_", "NCCL_", "CUDA_", "OMP_", "VLLM_", "HF_", "RAY_")
_ASSIGNED = re.compile(
    r"(?i)((?:api|admin|auth|instance)[-_a-z]*(?:key|token)|password|secret|kv_seal|authorization|bearer)"
    r"(\"?\s*[:= ]\s*\"?)(?:bearer\s+)?[^\s\",;]+"
)
_IN_URL = re.compile(r"(\w+://)[^/@\s]+@")
_MIN_SECRET = 6
REMOVED = "(removed)"


def secrets_of(variables: Mapping[str, str] = os.environ) -> list[str]:
    """The values that must not be in a bundle: of variables that are named like a secret, and this user's token."""
    values = {value for name, value in variables.items() if _NAMES.search(name) and not name.endswith("_FILE")}
    with suppress(ConfigError):
        values |= {shared_token() or "", users_token() or ""}
    return sorted((value for value in values if len(value) >= _MIN_SECRET), key=len, reverse=True)


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text without these values, and without what stands where a key stands."""
    for secret in secrets:
        text = text.replace(secret, REMOVED)
    text = _IN_URL.sub(rf"\g<1>{REMOVED}@", text)
    return _ASSIGNED.sub(rf"\g<1>\g<2>{REMOVED}", text)


def write_bundle(path: Path, findings: Sequence[Finding], variables: Mapping[str, str] = os.environ) -> None:
    """Write the bundle, a ZIP file that only its user can read. Raises `ConfigError`."""
    secrets = secrets_of(variables)
    contents = {
        "findings.txt": "\n".join(_text(finding) for finding in findings),
        "findings.json": msgspec.json.encode(list(findings)).decode(),
        "versions.txt": _versions(),
        "variables.txt": _variables(variables),
        **_logs(),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            archive.writestr(name, without_secrets(text, secrets))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(buffer.getvalue())
    except OSError as error:
        raise ConfigError(f"--bundle {path}: {error.strerror or error}") from error


def _text(finding: Finding) -> str:
    remedy = f"\n    {finding.remedy}" if finding.remedy else ""
    return f"{MARKS[finding.verdict]} {finding.text}{remedy}"


def _versions() -> str:
    packages = sorted({f"{package.metadata['Name']} {package.version}" for package in distributions()}, key=str.lower)
    head = [f"kvferry {__version__}", f"Python {sys.version}", f"{platform.platform()} {platform.machine()}"]
    return "\n".join([*head, "", *packages])


def _variables(variables: Mapping[str, str]) -> str:
    return "\n".join(
        f"{name}={REMOVED if _NAMES.search(name) else value}"
        for name, value in sorted(variables.items())
        if name.startswith(_VARIABLES)
    )


def _logs(max_logs: int = 8) -> dict[str, str]:
    """The ends of the `max_logs` newest logs of commands and of fleets' controllers, and the specs of these."""
    with suppress(OSError, ConfigError):
        folder = state_folder()
        paths = [*(folder / "logs").glob("*.log"), *(folder / "fleets").glob("*/controller.log")]
        newest = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[:max_logs]
        return {f"logs/{path.parent.name}-{path.name}": _end(path) for path in newest}
    return {}


def _end(path: Path, max_bytes: int = 256 * 1024) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        return file.read(max_bytes).decode(errors="replace")
    return ""
