"""Keys of requests over every kind of store: P stores under them, D loads by them, and the tokens are those of one
engine alone."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import ModelMaker
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.kv_keys import MAX_KEY_BYTES, KVTransferParams
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.testing.stepping import IdleWait
from support.engines import GREEDY, SEEDED, Answer, random_prompts, require_same, run_prompts, run_requests
from support.ports import free_port

sys.path[:0] = [str(Path(__file__).parents[1] / "store" / "support")]

from servers import start_mooncake_master  # noqa: E402 - found through the line above

BLOCK_SIZE = 8
FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
LENGTHS = [1, 7, 8, 9, 16, 31, 80, 113, *range(20, 168, 7)]
"""Prompts of one token to twenty blocks."""
MEDIA = ["file", "memory", "valkey", "lmcache", "mooncake"]
Keys = Callable[[int, Sequence[int]], list[str | None]]
FORMS: dict[str, Keys] = {
    "one key a prompt": lambda number, prompt: [f"prompt {number}"],
    "one key a block": lambda number, prompt: [f"{number}/{at}" for at in range(max(1, len(prompt) // BLOCK_SIZE))],
}


@pytest.fixture(scope="module")
def alone(model_maker: ModelMaker) -> dict[str, Any]:
    """What one engine without a connector answers, with the prompts."""
    model = model_maker("llama")
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB")
    with closing(Engine(config)) as engine:
        drawn = random_prompts(len(LENGTHS), engine.model.vocab_size, longest=200, block_size=BLOCK_SIZE, seed=29)
        prompts = [(prompt * 200)[:length] for prompt, length in zip(drawn, LENGTHS, strict=True)]
        answers = {"greedy": run_prompts(engine, prompts, GREEDY), "seeded": run_prompts(engine, prompts, SEEDED)}
        return {"model": model, "prompts": prompts, **answers}


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address, process = start_mooncake_master(tmp_path_factory.mktemp("mooncake"))
    yield address
    process.terminate()
    process.wait(20)


@pytest.fixture
def url_of(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """The URL of a new store of some medium."""

    def url(medium: str) -> str:
        match medium:
            case "valkey":
                return str(request.getfixturevalue("valkey_url"))
            case "lmcache":
                return f"lmcache://127.0.0.1:{request.getfixturevalue('lmcache_port')}"
            case "mooncake":
                return f"mooncake://{request.getfixturevalue('mooncake')}?segment_bytes=64MiB"
            case "memory":
                return f"memory:64MiB?name={abs(hash(str(tmp_path)))}"
        return f"file:{tmp_path}"

    return url


@contextmanager
def engine_of(
    model: Path, store: str | list[str], role: str = "kv_both", *, connector: str = "KVStoreConnector",
    extra: dict[str, Any] | None = None, token: str = "test", **settings: Any,
) -> Iterator[Engine]:  # fmt: skip
    extra = {"store": store, "timeout_s": 40.0, **(extra or {})}
    transfer = KVTransferConfig(kv_connector=connector, kv_role=role, kv_connector_extra_config=extra)  # type: ignore[arg-type]
    defaults = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "64MiB", "block_size": BLOCK_SIZE}
    config = EngineConfig(model=str(model), max_num_seqs=48, **{**defaults, **settings})
    with closing(Engine(config, transfer, auth_token=token)) as engine:
        yield engine
        engine.check()


def keyed(
    name: str, prompt: Sequence[int], sampling: SamplingParams, *, store: Sequence[str | None] = (),
    load: Sequence[str | None] = (), salt: str = "", **params: Any,
) -> Request:  # fmt: skip
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling=sampling,
        cache_salt=salt,
        transfer_params=KVTransferParams(
            kvcache_store_keys=tuple(store), kvcache_load_keys=tuple(load), tenant=salt, **params
        ),
    )


def run(engine: Engine, *requests: Request) -> list[Answer]:
    answers = run_requests(engine, requests)
    return [answers[request.request_id] for request in requests]


def num_usable(prompt: Sequence[int]) -> int:
    """The tokens of the full blocks before the prompt's last token, which is computed in any case."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.diagonal
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("medium", MEDIA)
def test_p_stores_and_d_loads(
    medium: str, form: str, alone: dict[str, Any], url_of: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """All prompts at once at P, then all at once at D, right after P's answers have ended."""
    url, prompts = url_of(medium), alone["prompts"]
    keys = [[key and f"{medium} {form} {key}" for key in FORMS[form](*one)] for one in enumerate(prompts)]
    with engine_of(alone["model"], url, "kv_producer") as producer, engine_of(alone["model"], url) as consumer:
        run(producer, *(keyed(f"p{at}", prompts[at], FIRST, store=keys[at]) for at in range(len(prompts))))
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            began = time.monotonic()
            requests = [keyed(f"{name}{at}", prompts[at], sampling, load=keys[at]) for at in range(len(prompts))]
            answers = run(consumer, *requests)
            require_same(alone[name], answers)
            assert time.monotonic() - began < 35.0, "a key that is there was waited for"
            if name == "greedy":
                figures = consumer.statistics()
                found = figures.external_kv.num_external_hits + figures.scheduler.num_prefix_hits
                assert found >= sum(map(num_usable, prompts))
    assert not [record for record in caplog.records if "keys do not bring" in record.getMessage()]


@pytest.fixture
def prompt(alone: dict[str, Any]) -> list[int]:
    """The longest one: twenty blocks and more."""
    return max(alone["prompts"], key=len)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "keys do not bring" in record.getMessage()]


def test_what_is_stored_under_a_key_is_compared_and_not_believed(
    alone: dict[str, Any], prompt: list[int], tmp_path: Path, model_maker: ModelMaker, caplog: pytest.LogCaptureFixture
) -> None:
    other_prompt = [prompt[0] + 1, *prompt[1:]]
    half = [*prompt[:80], *(token + 1 for token in prompt[80:])]
    with engine_of(alone["model"], f"file:{tmp_path}") as producer:
        run(producer, keyed("p", prompt, FIRST, store=["k"]))
        for model, block_size, token, tokens, reason in (
            (alone["model"], 8, "test", other_prompt, "is of another prompt"),
            (alone["model"], 8, "test", half, "is of another prompt, whose first 80 tokens are the same"),
            (model_maker("qwen2"), 8, "test", prompt, "is of another model, or of another configuration"),
            (alone["model"], 16, "test", prompt, "is of blocks of 8 tokens, and this instance has blocks of 16"),
            (alone["model"], 8, "another fleet", prompt, "is not in the store"),
        ):
            caplog.clear()
            with engine_of(model, f"file:{tmp_path}", block_size=block_size, token=token) as consumer:
                request = keyed("d", tokens, GREEDY, load=["k"], kvcache_wait_s=0.3)
                [answer] = run(consumer, request)
                config = EngineConfig(
                    model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB", block_size=block_size
                )
                with closing(Engine(config)) as reference:
                    require_same(run_prompts(reference, [tokens], GREEDY), [answer])
            assert len(said(caplog)) == 1, reason
            assert f"key 'k' {reason}" in said(caplog)[0]


def test_tenants_do_not_see_each_others_keys(
    alone: dict[str, Any], prompt: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(alone["model"], f"file:{tmp_path}") as producer, engine_of(alone["model"], f"file:{tmp_path}") as d:
        run(producer, keyed("p", prompt, FIRST, store=["k"], salt="a"))
        run(d, keyed("b", prompt, GREEDY, load=["k"], salt="b", kvcache_wait_s=0.2))
        run(d, keyed("none", prompt, GREEDY, load=["k"], kvcache_wait_s=0.2))
        assert d.statistics().external_kv.num_external_hits == 0
        assert [text.count("is not in the store") for text in said(caplog)] == [1, 1]
        run(d, keyed("a", prompt, GREEDY, load=["k"], salt="a"))
        assert d.statistics().external_kv.num_external_hits == num_usable(prompt)


def test_a_stored_key_is_replaced_and_expires(
    alone: dict[str, Any], prompt: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = prompt, [token + 1 for token in prompt]
    with engine_of(alone["model"], f"file:{tmp_path}") as producer, engine_of(alone["model"], f"file:{tmp_path}") as d:
        run(producer, keyed("p1", first, FIRST, store=["k"]))
        run(producer, keyed("p2", second, FIRST, store=["k"]))
        run(producer, keyed("p3", second, FIRST, store=["short"], kvcache_ttl_s=0.5))
        run(d, keyed("d2", second, GREEDY, load=["k"], kvcache_wait_s=0.2))
        assert said(caplog) == []
        run(d, keyed("d1", first, GREEDY, load=["k"], kvcache_wait_s=0.2))
        assert "is of another prompt" in said(caplog)[0]
        deadline, number = time.monotonic() + 60, 0
        while "is not in the store" not in said(caplog)[-1]:
            assert time.monotonic() < deadline
            number += 1  # else the prefix cache has it all, and the store is not asked
            run(d, keyed("d3", [number, *second], FIRST, load=["short"], kvcache_wait_s=0.1))


def test_missing_keys_are_waited_for_within_bounds_and_hold_up_nobody(
    alone: dict[str, Any], prompt: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(alone["model"], f"file:{tmp_path}", extra={"timeout_s": 3.0}) as engine:
        waiting = keyed("waits", prompt, GREEDY, load=["never"], kvcache_wait_s=1e6)
        began = time.monotonic()
        engine.add(waiting)
        others, is_other_running = 0, False
        answer = Answer()
        while answer.last is None or answer.last.finish_reason is None:
            assert time.monotonic() < began + 60
            if not is_other_running and others < 2:
                others, is_other_running = others + 1, True
                engine.add(keyed("other", alone["prompts"][others], FIRST))
            for output in engine.step():
                if output.request_id == "waits":
                    answer.add(output)
                elif output.finish_reason is not None:
                    is_other_running = False
                    assert time.monotonic() < began + 3.0 or others == 2
                    assert answer.last is None or others == 2
        assert time.monotonic() - began >= 3.0
        require_same([alone["greedy"][alone["prompts"].index(prompt)]], [answer])
        assert len(said(caplog)) == 1


def test_a_key_that_comes_later_is_waited_for(alone: dict[str, Any], prompt: list[int], tmp_path: Path) -> None:
    with engine_of(alone["model"], f"file:{tmp_path}") as producer, engine_of(alone["model"], f"file:{tmp_path}") as d:
        d.add(keyed("d", prompt, GREEDY, load=["k"]))
        for _ in range(5):
            assert d.step() == []
        run(producer, keyed("p", prompt, FIRST, store=["k"]))
        answer, rest = Answer(), IdleWait(d)
        while answer.last is None or answer.last.finish_reason is None:
            for output in d.step():
                answer.add(output)
            rest()
        require_same([alone["greedy"][alone["prompts"].index(prompt)]], [answer])
        assert d.statistics().external_kv.num_external_hits == num_usable(prompt)


def test_blocks_that_are_gone_are_computed(alone: dict[str, Any], prompt: list[int], tmp_path: Path) -> None:
    expected = [alone["greedy"][alone["prompts"].index(prompt)]]
    with engine_of(alone["model"], f"file:{tmp_path}") as producer, engine_of(alone["model"], f"file:{tmp_path}") as d:
        run(producer, keyed("p", prompt, FIRST, store=["k"]))
        blocks = sorted(tmp_path.glob("*/??/*.kv"))
        assert len(blocks) == len(prompt) // BLOCK_SIZE
        for path in blocks[::3]:
            path.unlink()
        require_same(expected, run(d, keyed("d", prompt, GREEDY, load=["k"])))
    with engine_of(alone["model"], f"file:{tmp_path}") as d:
        for path in tmp_path.glob("notes/*"):
            path.write_bytes(b"\xff" * 16 + path.read_bytes()[:7])
        require_same(expected, run(d, keyed("d", prompt, GREEDY, load=["k"], kvcache_wait_s=0.1)))


def test_a_store_that_is_down_is_not_waited_for(
    alone: dict[str, Any], prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    url = f"valkey://127.0.0.1:{free_port()}"
    expected = [alone["greedy"][alone["prompts"].index(prompt)]]
    with engine_of(alone["model"], url) as producer, engine_of(alone["model"], url) as consumer:
        began = time.monotonic()
        run(producer, keyed("p", prompt, FIRST, store=["k"]))
        require_same(expected, run(consumer, keyed("d", prompt, GREEDY, load=["k"])))
        assert time.monotonic() - began < 30.0
    assert "cannot be looked up" in said(caplog)[0]


ODD_KEYS = [
    "k", "K", "k ", "\0", "k\0", "\0k", "../../escape", "/etc/passwd", "notes/x", "a/../b", "..", ".",
    "ключ", "🗝" * 256,
    "é", "e\u0301", "x" * MAX_KEY_BYTES, "x" * (MAX_KEY_BYTES - 1), "kvferry:note:1", "*", "%00", "\n", "key 0 0",
    "\ud800",
]  # fmt: skip


def test_odd_keys_are_kept_apart_and_escape_nothing(alone: dict[str, Any], tmp_path: Path) -> None:
    store = tmp_path / "a" / "b" / "store"
    lengths = {key: 16 + at for at, key in enumerate(ODD_KEYS)}
    prompts = {key: [(at * 31 + token) % 500 for token in range(lengths[key])] for at, key in enumerate(ODD_KEYS)}
    with engine_of(alone["model"], f"file:{store}") as producer, engine_of(alone["model"], f"file:{store}") as d:
        run(producer, *(keyed(f"p{at}", prompts[key], FIRST, store=[key]) for at, key in enumerate(ODD_KEYS)))
        run(d, *(keyed(f"d{at}", prompts[key], FIRST, load=[key]) for at, key in enumerate(ODD_KEYS)))
        figures = d.statistics().connector
        assert figures["found_keys"] == len(ODD_KEYS)
        assert figures.get("refused_keys", 0) == 0
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and store not in path.parents]
    assert outside == []
    assert all(re.fullmatch(r"[0-9a-f]{64}\.(note|kv|pin)", path.name) for path in store.rglob("*") if path.is_file())
    with_sign = len(ODD_KEYS) + 1
    assert len(list((store / "notes").iterdir())) in (len(ODD_KEYS), with_sign)


def test_ten_thousand_keys_of_one_prompt(alone: dict[str, Any], prompt: list[int], tmp_path: Path) -> None:
    keys = [f"key {number}" for number in range(10_000)]
    with engine_of(alone["model"], f"file:{tmp_path}") as producer, engine_of(alone["model"], f"file:{tmp_path}") as d:
        run(producer, keyed("p", prompt, FIRST, store=keys))
        [answer] = run(d, keyed("d", prompt, GREEDY, load=keys))
        require_same([alone["greedy"][alone["prompts"].index(prompt)]], [answer])
        assert d.statistics().connector["found_keys"] == len(keys)


def test_with_several_connectors(alone: dict[str, Any], prompt: list[int], tmp_path: Path) -> None:
    children = [
        {"kv_connector": "P2pConnector"},
        {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": f"file:{tmp_path}"}},
    ]
    transfer = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children})
    config = EngineConfig(
        model=str(alone["model"]), dtype="float32", device="cpu", kv_cache_memory="64MiB", block_size=BLOCK_SIZE
    )
    with closing(Engine(config, transfer, auth_token="test")) as first:
        run(first, keyed("p", prompt, FIRST, store=["k"]))
        first.check()
    with closing(Engine(config, transfer, auth_token="test")) as second:
        answers = run(second, keyed("d", prompt, GREEDY, load=["k"]))
        require_same([alone["greedy"][alone["prompts"].index(prompt)]], answers)
        assert second.statistics().external_kv.num_external_hits == num_usable(prompt)
        second.check()


def test_a_document_is_used_by_its_key_later(alone: dict[str, Any], prompt: list[int], tmp_path: Path) -> None:
    """RFC 5557's second use: other prompts that begin with it, on an instance that never saw it, after its producer
    is gone."""
    document = prompt[: 12 * BLOCK_SIZE]
    with engine_of(alone["model"], f"file:{tmp_path}", "kv_producer") as producer:
        request = keyed("p", prompt, FIRST, store=["handbook"], prefix_prompt_ids=tuple(document))
        run(producer, request)
    questions = [[*document, *range(at, at + 10)] for at in range(3)]
    with engine_of(alone["model"], f"file:{tmp_path}", prefix_caching=False) as consumer:
        run(consumer, *(keyed(f"d{at}", question, FIRST, load=["handbook"]) for at, question in enumerate(questions)))
        assert consumer.statistics().external_kv.num_external_hits == 3 * len(document)
        assert consumer.statistics().connector["found_keys"] == 3


def test_instances_that_cannot_store_or_load_say_so(alone: dict[str, Any], prompt: list[int], tmp_path: Path) -> None:
    with engine_of(alone["model"], f"file:{tmp_path}", "kv_consumer") as consumer:
        with pytest.raises(InvalidRequest, match="only decodes") as refused:
            consumer.add(keyed("p", prompt, FIRST, store=["k"]))
        assert refused.value.param == "kvcache_store_keys"
    config = EngineConfig(model=str(alone["model"]), dtype="float32", device="cpu", kv_cache_memory="64MiB")
    for transfer in (None, KVTransferConfig(kv_connector="P2pConnector")):
        with closing(Engine(config, transfer)) as engine:
            for field, keys in (("kvcache_store_keys", {"store": ["k"]}), ("kvcache_load_keys", {"load": ["k"]})):
                with pytest.raises(InvalidRequest, match="needs a connector") as refused:
                    engine.add(keyed("p", prompt, FIRST, **keys))  # type: ignore[arg-type]
                assert refused.value.param == field


def test_an_aborted_request_leaves_nothing(alone: dict[str, Any], prompt: list[int], tmp_path: Path) -> None:
    with engine_of(alone["model"], f"file:{tmp_path}") as engine:
        for number in range(4):
            engine.add(keyed(f"s{number}", prompt, GREEDY, store=[f"k{number}"]))
            engine.add(keyed(f"l{number}", [number, *prompt], GREEDY, load=["never"]))
        for number in range(4):
            engine.step()
            engine.abort(f"s{number}")
            engine.abort(f"l{number}")
        rest = IdleWait(engine)
        while engine.has_work:
            engine.step()
            rest()
