"""A command that is told to end does so within seconds, also while the look-up of a name gets no answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.waiting import until

pytestmark = pytest.mark.processes

NEVER = "http://never.example:8000"
LOOK_UP = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef int look_up(const char *, const char *, const struct addrinfo *, struct addrinfo **);
int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    if (node && strstr(node, "never.example")) {
        close(open(getenv("LOOKED_UP"), O_CREAT | O_WRONLY, 0600));
        for (;;) pause();
    }
    return ((look_up *)dlsym(RTLD_NEXT, "getaddrinfo"))(node, service, hints, found);
}
"""
SCALED = """
name = "f"
mode = "pooling"
model = "m"
[role.prefill]
max = 2
[role.decode]
max = 2
[scale]
ttft = "1s"
itl = "50ms"
recommend = true
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As name servers that do not answer."""
    folder = tmp_path_factory.mktemp("look-up")
    (folder / "look_up.c").write_text(LOOK_UP)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "look_up.so", "look_up.c", "-ldl"], cwd=folder, check=True)
    return folder / "look_up.so"


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (["router", "--decode-url", NEVER, "--port=0", "--grace-s=0"], signal.SIGTERM, 0),
        (["decode", "kvferry/tiny-python", "--register", NEVER, "--port=0", "--grace-s=0"], signal.SIGTERM, 0),
        (["fleet", "recommend", "SPEC", "--router", NEVER], signal.SIGTERM, 0),
        (["fleet", "drain", NEVER, "--router", NEVER], signal.SIGINT, 130),
        (["why", NEVER], signal.SIGINT, 130),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_look_ups_that_get_no_answer(
    command: list[str], number: signal.Signals, code: int, library: Path, tmp_path: Path
) -> None:
    (tmp_path / "spec.toml").write_text(SCALED)
    arguments = [str(tmp_path / "spec.toml") if argument == "SPEC" else argument for argument in command]
    environment = {"LD_PRELOAD": str(library), "LOOKED_UP": str(tmp_path / "looked-up"), "OMP_NUM_THREADS": "1"}
    environment |= {"KVFERRY_AUTH_TOKEN": "a token of tests, which is long enough"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli.main", *arguments],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
        )
    try:
        until((tmp_path / "looked-up").exists, 120.0, (tmp_path / "log").read_text)
        begun = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=60) == code, (tmp_path / "log").read_text()
        assert time.monotonic() - begun < 12.0
    finally:
        process.kill()
        process.wait()
