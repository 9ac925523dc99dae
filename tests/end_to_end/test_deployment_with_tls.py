"""The example of docs/deployment.md with TLS everywhere, run as it stands there, on one machine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from conftest import ModelMaker
from support.ports import free_port
from support.processes import AUTH_TOKEN, KvferryProcess, kvferry, run

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"


def blocks() -> list[str]:
    """Of the section about TLS."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = [one for one in section if one.startswith("5. TLS")]
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)


def test_it_serves_and_says_what_is_wrong(
    model_maker: ModelMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (shutil.which("openssl") and shutil.which("curl")):
        pytest.skip("there is no openssl, or no curl")
    makes, starts, uses = blocks()
    monkeypatch.chdir(tmp_path)
    here = {
        "MODEL": str(model_maker("llama")),
        "10.0.0.1": "127.0.0.1",
        "10.0.0.2": "127.0.0.2",
        "0.0.0.0": "127.0.0.1",
    }
    ports = {number: str(free_port()) for number in ("8001", "8002", "8000")}

    def adapted(text: str) -> str:
        for said, meant in (here | ports).items():
            text = re.sub(rf"(?<![\w.]){re.escape(said)}(?![\w]|\.\d)", meant, text)
        return text.replace("8101", str(free_port()))

    subprocess.run(["sh", "-ec", adapted(makes)], check=True, capture_output=True, cwd=tmp_path)
    with ExitStack() as stack:
        started: dict[str, KvferryProcess] = {}
        for command in starts.strip().split("\n\n"):
            words = shlex.split(adapted(command).replace("\\\n", " "))[1:]
            port = int(words.pop(words.index("--port") + 1))
            words.remove("--port")
            if words[0] != "router":
                words += ["--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB"]
            log = tmp_path / f"{words[0]}.log"
            started[words[0]] = stack.enter_context(kvferry(*words, log=log, port=port))
        curl, fleet = adapted(uses).replace("\\\n", " ").strip().splitlines()
        done = subprocess.run(["sh", "-ec", f"{curl} -sS"], check=True, capture_output=True, text=True, cwd=tmp_path)
        assert "transfer_done" in json.loads(done.stdout)["timeline"]
        trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        metrics = httpx.get(started["decode"].url + "/metrics", verify=trusted).text
        assert re.search(r'^kvferry:connector_taken_bytes_total\{.*kind="(\w+)".*\} [1-9]', metrics, re.MULTILINE)
        listed = run(*shlex.split(fleet)[1:])
        assert re.findall(r"(\S+) +up ", listed.stdout) == ["prefill-0", "decode-0"], listed.stderr
        monkeypatch.setenv("KVFERRY_AUTH_TOKEN", AUTH_TOKEN)
        distrusting = run(*shlex.split(fleet.replace(" --tls-ca ca.pem", ""))[1:])
        assert distrusting.returncode == 1
        assert "name one with --tls-ca of this command" in distrusting.stderr
