"""Requests as handlers see them: parameters, numbers, headers and ids."""

from __future__ import annotations

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.http.server.request import Caller, HttpRequest, id_of, path_of


def asked(target: str, first: dict[bytes, bytes] | None = None) -> HttpRequest:
    body: object = None
    return HttpRequest("GET", target, path_of(target), [], first or {}, body, "id", "::1", Caller(b"::1"), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "path"), [("/a", "/a"), ("/a?b=/c", "/a"), ("/a%20b?x", "/a b"), ("/%C3%BC", "/\u00fc"), ("/a%", "/a%")]
)
def test_a_path_is_decoded_and_has_no_query(target: str, path: str) -> None:
    assert path_of(target) == path


def test_parameters_are_found() -> None:
    request = asked("/a?x=1&empty=&y=%26")
    assert (request.parameter("x"), request.parameter("empty"), request.parameter("y")) == ("1", "", "&")
    assert request.parameter("none", "default") == "default"
    assert asked("/a").parameter("x", "d") == "d"
    assert request.query == "x=1&empty=&y=%26"


def test_a_parameter_that_is_given_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="x is given 2 times") as caught:
        asked("/a?x=1&x=1").parameter("x")
    assert caught.value.param == "x"
    with pytest.raises(InvalidRequest, match="more than 16 parameters"):
        asked("/a?" + "&".join(f"p{number}=1" for number in range(17))).parameter("p1")


@pytest.mark.parametrize("text", ["-1", "1.5", "", "x", "1e3", "\u0661", "1000000000", "%D9%A1", " 1"])
def test_what_is_no_number_is_refused(text: str) -> None:
    assert asked("/a?n=007").number("n", 3) == 7
    assert asked("/a?n=999999999").number("n", 3) == 999_999_999
    assert asked("/a").number("n", 3) == 3
    with pytest.raises(InvalidRequest, match="n must be a number"):
        asked(f"/a?n={text}").number("n", 3)


def test_headers_are_found_whatever_their_case() -> None:
    request = asked("/", {b"x-a": b"\xfc"})
    assert request.header("X-A") == "\u00fc"
    assert request.header("X-B") is None


def test_a_request_has_its_clients_id_or_a_new_one() -> None:
    assert id_of({b"x-request-id": b"mine"}) == "mine"
    new = {id_of({}), id_of({}), id_of({b"x-request-id": b"not fit\xff"})}
    assert len(new) == 3
