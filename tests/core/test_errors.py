"""The tree of errors: names near to unknown ones, and what clients get."""

from __future__ import annotations

import pytest

from kvferry.core import errors
from kvferry.core.errors import ConfigError, KvferryError, MissingDependency, RequestError, UnknownName


def test_an_unknown_name_gets_the_nearest_or_all() -> None:
    near = UnknownName("connector", "P2pConector", ["P2pConnector", "KVStoreConnector"])
    assert str(near) == "unknown connector 'P2pConector'; did you mean 'P2pConnector'?"
    assert str(UnknownName("policy", "xyzzy", ["b", "a"])) == "unknown policy 'xyzzy'; known: a, b"
    assert str(UnknownName("policy", "x", [])) == "unknown policy 'x'; known: none"
    assert (near.kind, near.name) == ("connector", "P2pConector")


def test_a_missing_package_says_how_to_install_it() -> None:
    error = MissingDependency("--plot", "matplotlib", "plot")
    assert isinstance(error, ConfigError)
    assert "pip install 'kvferry[plot]'" in str(error)


def test_all_are_in_the_tree_and_drawn_there() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert errors.__doc__ is not None
    for kind in kinds:
        assert issubclass(kind, KvferryError)
        assert kind.__name__ in errors.__doc__, kind


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
)
def test_answers_to_clients_have_an_http_status(kind: type[RequestError]) -> None:
    assert 400 <= kind.status <= 599
    assert kind.kind
    error = RequestError("text", param="field")
    assert (error.message, error.param, str(error)) == ("text", "field", "text")
