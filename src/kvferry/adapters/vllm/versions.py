"""The releases of vLLM with which this adapter was tested. vLLM calls its connector API experimental and changes it
often."""

from __future__ import annotations

import logging
import os
import re

from kvferry.core.errors import ConfigError, MissingDependency
from kvferry.core.settings import environment

logger = logging.getLogger(__name__)

TESTED = {"0.32": "0.32.0, CPU build", "0.33": "the Python of 0.33.0 over the compiled parts of 0.32.0's CPU build"}
"""Release line → the tested build."""
OVERRIDE = environment.ALLOW_UNTESTED_VLLM


def release_line(version: str) -> str:
    """The part of a version within which the connector API does not change: "0.32" of "0.32.1+cpu"."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


def installed_version() -> str:
    """vLLM's version. Raises `MissingDependency` if it is not installed."""
    try:
        from vllm import __version__
    except ImportError as error:
        raise MissingDependency("kvferry.adapters.vllm", "vllm", "vllm") from error
    return str(__version__)


def require_tested(version: str | None = None) -> None:
    """Raise `ConfigError` if the installed vLLM (or `version`) was not tested; with KVFERRY_ALLOW_UNTESTED_VLLM, log a
    warning instead."""
    version = version or installed_version()
    if release_line(version) in TESTED:
        return
    tested = ", ".join(TESTED)
    if os.environ.get(OVERRIDE, "") not in ("", "0"):
        logger.warning("vLLM %s was never tested with kvferry's connectors (tested: %s)", version, tested)
        return
    raise ConfigError(
        f"kvferry's connectors were tested with vLLM {tested}, and this is {version}; install a tested version, or"
        f" set {OVERRIDE}=1 to try it nevertheless"
    )
