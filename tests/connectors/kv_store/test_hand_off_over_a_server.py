"""Hand-offs through a real Valkey or Redis server: also when it is killed, stopped, emptied, or lies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from fake_engine import FakeEngine, FakeRequest, consumed, produced

from kvferry.connectors.kv_store.markers import MARKER_S, BadMarker, Marker, Markers
from kvferry.core.clock import ManualClock
from kvferry.core.errors import LeaseEnded, ProtocolError, StoreError, TransferTimeout
from kvferry.core.messages.hand_off import Ticket
from kvferry.store.media.valkey import _note_key
from kvferry.store.table import find_store
from kvferry.transport.transfer_loop import TransferLoop
from support.ports import free_port
from support.valkey_server import BINARIES, ValkeyServer, server_binary

PROMPT = list(range(100, 119))
OTHER = [7, *PROMPT[1:]]
BLOCK = 4
PATIENT_S, SHORT_S = 30.0, 0.3
NOTE = _note_key("t.0")
Make = Callable[..., FakeEngine]


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """One that a test may do anything to."""
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    server = ValkeyServer()
    yield server
    server.close()


@pytest.fixture
def make(make_engine: Make, server: ValkeyServer) -> Make:
    def make(role: str, **options: object) -> FakeEngine:
        return make_engine("KVStoreConnector", role, **{"store": server.url, "timeout_s": PATIENT_S, **options})

    return make


def test_a_server_that_is_down_at_the_start_is_told_of_at_once(
    make_engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    make_engine("KVStoreConnector", store=["memory:1MiB", f"valkey://:secret@127.0.0.1:{port}/2?ttl_s=60"])
    (told,) = [record.getMessage() for record in caplog.records if record.name == "kvferry.store.tiered.breaker"]
    assert told.startswith(f"store valkey://***@127.0.0.1:{port}/2?ttl_s=60 cannot be used: cannot reach")
    assert "prompts are computed" in told
    assert "tried again" in told
    assert "secret" not in told


def early_ticket(key: str = "t") -> dict[str, object]:
    return Ticket(transfer_id=key).to_params()


def settle(engine: FakeEngine) -> None:
    """Until all that was saved is on the server."""
    engine.run_until(engine.worker.is_flushed)


def prefill(producer: FakeEngine, tokens: list[int] = PROMPT, key: str = "t") -> FakeRequest:
    request = producer.run(produced(tokens, key))
    settle(producer)
    return request


def take(server: ValkeyServer, key: str = NOTE) -> bytes:
    """What lies there, as a command that puts it back."""
    answer = server.send(_command(b"DUMP", key.encode()))
    value = answer.partition(b"\r\n")[2][:-2]
    return _command(b"RESTORE", key.encode(), b"0", value, b"REPLACE")


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def require_whole(engine: FakeEngine, request: FakeRequest) -> None:
    """Its KV came, all but what is left of a last block."""
    assert (request.error, request.num_computed_here) == (None, len(request.tokens) % BLOCK)
    engine.require_right(request)


@pytest.mark.parametrize("bound", ["", "?max_bytes=1MiB"])
@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_p_and_d_hand_off(make: Make, server: ValkeyServer, form: str, bound: str) -> None:
    store = server.url + bound
    producer, consumer = make("kv_producer", store=store), make("kv_consumer", store=store)
    if form == "concurrent":
        decode = consumer.add(consumed(PROMPT, early_ticket()))
        consumer.step()
        assert decode.state == "waiting"
        before = prefill(producer)
    else:
        before = prefill(producer)
        decode = consumer.add(consumed(PROMPT, before.ticket))
    consumer.run_until(lambda: decode.state == "done" and not consumer.scheduler.has_work())
    require_whole(consumer, decode)
    assert decode.prefill_result == before.prefill_result
    consumer.run_until(lambda: server.say("EXISTS", NOTE) == b":0\r\n")


def test_a_marker_that_is_put_back_stands_for_no_other_prompt(make: Make, server: ValkeyServer) -> None:
    """Whoever can write to the server, or uses a transfer id twice: nobody gets another prompt's first token."""
    producer, consumer = make("kv_producer"), make("kv_consumer")
    before = prefill(producer)
    put_back = take(server)
    require_whole(consumer, consumer.run(consumed(PROMPT, before.ticket)))
    consumer.run_until(lambda: server.say("EXISTS", NOTE) == b":0\r\n")
    server.send(put_back)
    decode = consumer.run(consumed(OTHER, early_ticket()))
    assert isinstance(decode.error, ProtocolError)
    assert decode.num_computed_here == len(OTHER)
    assert decode.prefill_result != before.prefill_result
    consumer.require_right(decode)


def test_a_marker_that_is_put_back_stands_for_its_own_prompt(make: Make, server: ValkeyServer) -> None:
    producer, first, second = make("kv_producer"), make("kv_consumer"), make("kv_consumer")
    before = prefill(producer)
    put_back = take(server)
    first.run(consumed(PROMPT, before.ticket))
    server.send(put_back)
    decode = second.run(consumed(PROMPT, early_ticket()))
    require_whole(second, decode)
    assert decode.prefill_result == before.prefill_result


@pytest.mark.parametrize("key", ["u", "T"])
def test_a_marker_under_another_name_is_refused(make: Make, server: ValkeyServer, key: str) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill(producer)
    moved = take(server).replace(NOTE.encode(), _note_key(f"{key}.0").encode())
    server.send(moved)
    assert isinstance(consumer.run(consumed(PROMPT, early_ticket(key), key)).error, BadMarker)


def test_a_marker_of_another_token_is_refused(make: Make) -> None:
    producer, consumer = make("kv_producer", token="another"), make("kv_consumer")
    prefill(producer)
    error = consumer.run(consumed(PROMPT, early_ticket())).error
    assert isinstance(error, BadMarker)
    assert "KVFERRY_AUTH_TOKEN" in str(error)


def test_a_marker_whose_time_is_over_is_none(make: Make, server: ValkeyServer) -> None:
    """Though the server still has it, or has it again."""
    producer = make("kv_producer")
    prefill(producer)
    store, loop = find_store(server.url).make(producer.layout), TransferLoop("test")
    loop.start()

    def read(at_s: float) -> Marker | None:
        found = Markers("secret", ManualClock(at_s)).read(store, "t", 0)
        marker: Marker | None = loop.submit(found).result(20)
        return marker

    found = read(time.time())
    assert found is not None
    assert read(found.expires_s + Markers.skew_s) == found
    assert read(found.expires_s + Markers.skew_s + 1) is None
    loop.submit(store.close()).result(20)
    loop.close()


@pytest.mark.parametrize("expires_s", [float("nan"), float("-inf"), MARKER_S])
def test_a_marker_with_no_time_is_none(make: Make, server: ValkeyServer, expires_s: float) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", timeout_s=SHORT_S)
    marker = Marker(transfer_id="t", layout=producer.layout, num_tokens=len(PROMPT), digest="")
    store, loop = find_store(server.url).make(producer.layout), TransferLoop("test")
    loop.start()
    loop.submit(Markers("secret", ManualClock(expires_s - MARKER_S)).write(store, marker)).result(20)
    loop.submit(store.close()).result(20)
    loop.close()
    assert isinstance(consumer.run(consumed(PROMPT, early_ticket())).error, TransferTimeout)


def test_a_prefill_that_is_given_up_is_not_waited_for(make: Make) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    decode = consumer.add(consumed(PROMPT, early_ticket()))
    consumer.step()
    request = producer.add(produced(PROMPT))
    producer.step()
    producer.abort(request)
    producer.step()
    settle(producer)
    consumer.run_until(lambda: decode.state == "done")
    assert isinstance(decode.error, LeaseEnded)
    consumer.require_right(decode)


def hand_off_works(producer: FakeEngine, consumer: FakeEngine, key: str) -> bool:
    """A whole one, of a prompt that nobody had before."""
    tokens = [*key.encode(), *PROMPT]
    decode = consumer.run(consumed(tokens, prefill(producer, tokens, key).ticket, key))
    consumer.require_right(decode)
    return decode.error is None and decode.num_computed_here < BLOCK


def require_it_comes_back(producer: FakeEngine, consumer: FakeEngine) -> None:
    """By itself, once the stores' health looks again."""
    end, number = time.monotonic() + 60, 0
    while not hand_off_works(producer, consumer, f"again-{number}"):
        assert time.monotonic() < end
        number += 1


def test_the_server_is_killed_while_d_waits(make: Make, server: ValkeyServer) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", timeout_s=SHORT_S)
    decode = consumer.add(consumed(PROMPT, early_ticket()))
    consumer.step()
    server.kill()
    consumer.run_until(lambda: decode.state == "done")
    assert isinstance(decode.error, TransferTimeout | StoreError)
    consumer.require_right(decode)
    server.start()
    require_it_comes_back(producer, consumer)


@pytest.mark.parametrize("comes_back", [False, True], ids=["stays away", "comes back empty"])
def test_the_server_is_killed_between_p_and_d(make: Make, server: ValkeyServer, comes_back: bool) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", timeout_s=SHORT_S)
    before = prefill(producer)
    server.kill()
    if comes_back:
        server.start()
    decode = consumer.run(consumed(PROMPT, before.ticket))
    assert isinstance(decode.error, TransferTimeout | StoreError)
    assert decode.num_computed_here == len(PROMPT)
    consumer.require_right(decode)
    if not comes_back:
        server.start()
    require_it_comes_back(producer, consumer)


def test_the_server_is_killed_while_p_saves(make: Make, server: ValkeyServer) -> None:
    """P goes on, and its marker never comes."""
    producer, consumer = make("kv_producer"), make("kv_consumer", timeout_s=SHORT_S)
    request = producer.add(produced(PROMPT))
    producer.step()
    server.kill()
    producer.run_until(lambda: request.state == "done")
    settle(producer)
    server.start()
    decode = consumer.run(consumed(PROMPT, request.ticket))
    assert isinstance(decode.error, TransferTimeout)
    consumer.require_right(decode)
    require_it_comes_back(producer, consumer)


@pytest.mark.short_deadlines
def test_a_server_that_hangs_holds_nobody_up(make: Make, server: ValkeyServer) -> None:
    store = f"{server.url}?deadline_s=0.2"
    producer, consumer = make("kv_producer", store=store), make("kv_consumer", store=store, timeout_s=SHORT_S)
    before = prefill(producer)
    server.pause()
    decode = consumer.run(consumed(PROMPT, before.ticket))
    assert decode.error is not None
    consumer.require_right(decode)
    server.resume()
    require_it_comes_back(producer, consumer)


def test_blocks_that_are_gone_behind_their_marker_are_computed_again(make: Make, server: ValkeyServer) -> None:
    """Evicted, say: the marker says what was there, and never more than is found."""
    producer, consumer = make("kv_producer"), make("kv_consumer")
    before = prefill(producer)
    layout = producer.layout
    third = f"kvferry:{{{layout.fingerprint()}.none}}:{before.block_hashes[2].hex()}"
    assert server.say("UNLINK", third) == b":1\r\n"
    decode = consumer.run(consumed(PROMPT, before.ticket))
    assert (decode.error, decode.num_computed_here) == (None, len(PROMPT) - 2 * BLOCK)
    assert decode.prefill_result == before.prefill_result
    consumer.require_right(decode)
