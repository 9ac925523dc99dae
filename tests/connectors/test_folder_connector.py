"""The worked example of a connector, as another package's, between engines without a model."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeRequest
from kv_support import make_layout, sharded

from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, StoreError
from kvferry.core.messages.hand_off import Produce, parse_hand_off
from kvferry.core.settings.transfer_config import KVTransferConfig

NAME = "folder_connector:FolderConnector"
PROMPT = list(range(100, 119))
MakeEngine = Callable[..., FakeEngine]


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    sys.modules.pop("folder_connector", None)


def prefill(engine: FakeEngine, prompt: list[int] = PROMPT) -> FakeRequest:
    return engine.run(FakeRequest("p", prompt, Produce("t/../1")))


def decode(engine: FakeEngine, ticket: dict[str, object] | None, prompt: list[int] = PROMPT) -> FakeRequest:
    return engine.run(FakeRequest("d", prompt, parse_hand_off(ticket, "d")))


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_hand_off(make_engine: MakeEngine, tmp_path: Path, tp_size: int, num_tokens: int) -> None:
    layout, prompt = sharded(make_layout(), tp_size), PROMPT[:num_tokens]
    assert 16 % layout.block_size == 0, "a prompt that fills its last block"
    producer, consumer = (make_engine(NAME, layout=layout, folder=str(tmp_path)) for _ in range(2))
    given = prefill(producer, prompt)
    assert len(list(tmp_path.iterdir())) == tp_size
    taken = decode(consumer, given.ticket, prompt)
    assert (taken.error, taken.num_computed_here) == (None, 1)
    assert taken.prefill_result == given.prefill_result
    assert not list(tmp_path.iterdir())
    again = decode(consumer, given.ticket, prompt)
    assert isinstance(again.error, PeerLost)
    assert again.num_computed_here == num_tokens


def test_another_prompt(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(NAME, folder=str(tmp_path))
    other = decode(engine, prefill(engine).ticket, [7, *PROMPT[1:]])
    assert isinstance(other.error, ProtocolError)


def test_a_file_that_was_cut_off(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(NAME, folder=str(tmp_path))
    ticket = prefill(engine).ticket
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert isinstance(decode(engine, ticket).error, StoreError)
    assert not list(tmp_path.iterdir())


def test_its_options_are_checked() -> None:
    config = KVTransferConfig(kv_connector=NAME, kv_connector_extra_config={"foldr": "/x"})
    with pytest.raises(ConfigError, match="did you mean 'folder'"):
        find_connector(config).check(config)
