"""End-to-end headers travel; those of one connection do not."""

from __future__ import annotations

from kvferry.router.headers import for_client, for_instance, request_id


def test_hop_by_hop_headers_stay() -> None:
    headers = [
        (b"host", b"router"),
        (b"connection", b"keep-alive, X-Secret-Hop"),
        (b"x-secret-hop", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"content-length", b"3"),
        (b"expect", b"100-continue"),
        (b"proxy-authorization", b"mine"),
        (b"authorization", b"Bearer key"),
        (b"x-custom", b"one"),
        (b"x-custom", b"two"),
        (b"x-kvferry-timeline", b"forged"),
        (b"x-request-id", b"old"),
    ]
    assert for_instance(headers, [(b"x-request-id", b"new")]) == [
        (b"authorization", b"Bearer key"),
        (b"x-custom", b"one"),
        (b"x-custom", b"two"),
        (b"x-request-id", b"new"),
    ]


def test_answers_get_the_request_id_unless_they_have_it() -> None:
    headers = [(b"Date", b"now"), (b"Server", b"uvicorn"), (b"Keep-Alive", b"5"), (b"X-Other", b"kept")]
    assert for_client(headers, b"abc") == [(b"x-other", b"kept"), (b"x-request-id", b"abc")]
    assert for_client([(b"X-Request-Id", b"theirs")], b"abc") == [(b"x-request-id", b"theirs")]


def test_request_ids() -> None:
    assert request_id([(b"x-request-id", b"chat-1")]) == b"chat-1"
    assert request_id([]) != request_id([])
    assert b"\n" not in request_id([(b"x-request-id", b"bad\nid")])
