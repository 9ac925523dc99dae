"""End-to-end headers travel; those of one connection do not."""

from __future__ import annotations

from kvferry.router.headers import for_client, for_instance


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


def test_answers_do_not_tell_who_gave_them() -> None:
    headers = [
        (b"date", b"now"),
        (b"server", b"uvicorn"),
        (b"keep-alive", b"5"),
        (b"location", b"/"),
        (b"x-other", b"kept"),
    ]
    assert for_client(headers) == [(b"x-other", b"kept")]
