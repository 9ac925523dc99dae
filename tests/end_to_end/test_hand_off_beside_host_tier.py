"""The command of docs/stores.md that joins a hand-off with a host tier, as it stands there but for its size: one
deployment of real processes, in which D takes P's KV, and both keep it in host memory."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import httpx
import pytest

from conftest import ModelMaker
from support.processes import OPERATOR, KvferryProcess, kvferry, sum_of
from support.waiting import until

# `make test` has what it shows in one process: `engine/test_cache_beside_hand_off.py`.
pytestmark = [pytest.mark.processes, pytest.mark.full(in_every_part=True)]

DOCS = Path(__file__).parents[2] / "docs" / "stores.md"
SMALL = (
    *("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=16", "--no-prefix-caching"),
)
TEXT = "The ferry carries the cache across the river. " * 8


def documented() -> list[str]:
    """The words of the command that has a MultiConnector in it."""
    blocks = re.findall(r"```bash\n(kvferry serve MODEL .*?)```", DOCS.read_text(), re.DOTALL)
    [command] = [block for block in blocks if "MultiConnector" in block]
    return shlex.split(command.replace("\\\n", " "))[1:]


def test_it_answers_and_keeps(model_maker: ModelMaker, tmp_path: Path) -> None:
    model = str(model_maker("llama", max_position_embeddings=1024))
    words = [word.replace("MODEL", model).replace("2GiB", "32MiB") for word in documented()]
    with kvferry("serve", model, *SMALL, log=tmp_path / "alone.log") as alone:
        expected = [tokens(alone, TEXT), tokens(alone, TEXT + "Again.")]
    with kvferry(*words, *SMALL, "--disaggregate-from=0", log=tmp_path / "log") as front:
        prefill, decode = instances(front)
        assert tokens(front, TEXT) == expected[0]
        assert figure(decode, "connector_0_taken_total") == 1
        for one in (prefill, decode):
            until(lambda: figure(one, "connector_1_kept_bytes") > 0, 60, front.log)  # noqa: B023
        until(lambda: figure(prefill, "connector_1_writer_waiting_bytes") == 0, 60, front.log)
        assert tokens(front, TEXT + "Again.") == expected[1]
        assert figure(decode, "connector_0_taken_total") == 2
        assert figure(prefill, "connector_1_loaded_blocks_total") > 0


def instances(front: KvferryProcess) -> list[str]:
    """Addresses of the prefill and the decode instance."""
    found = httpx.get(front.url + "/kvferry/instances", auth=OPERATOR, timeout=30).json()["instances"]
    by_role = {one["role"]: one["url"] for one in found}
    return [by_role["prefill"], by_role["decode"]]


def figure(instance: str, name: str) -> float:
    """One of its connector's figures."""
    return sum_of(httpx.get(instance + "/metrics", auth=OPERATOR, timeout=30).text, f"kvferry:{name}")


def tokens(server: KvferryProcess, prompt: str) -> list[int]:
    found: list[int] = server.complete(prompt)["choices"][0]["token_ids"]
    return found
