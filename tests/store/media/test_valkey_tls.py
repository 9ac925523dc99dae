"""A real Valkey or Redis server behind TLS and a password: who gets in, and what those are told who do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError, StoreError
from kvferry.store.base import PutResult
from kvferry.store.table import find_store
from kvferry.testing.stores import LAYOUT, block_of, fetch
from support.certificates import Authority
from support.ports import free_port
from support.valkey_server import BINARIES, ValkeyServer, server_binary

PASSWORD = "geheim und lang"
QUOTED = "geheim%20und%20lang"


class TlsServer:
    """One that listens with TLS only, with this certificate."""

    def __init__(self, authority: Authority, cert: Path, key: Path, *, asks_clients: bool = False) -> None:
        self.port = free_port()
        files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(authority.ca)]
        asks = ["--tls-auth-clients", "yes" if asks_clients else "no"]
        where = ["--tls-port", str(self.port), "--bind", "127.0.0.1", "127.0.0.2"]
        self.server = ValkeyServer(*where, *files, *asks)

    def url(self, query: str = "", *, user: str = "", host: str = "127.0.0.1", scheme: str = "valkeys") -> str:
        return f"{scheme}://{user}{host}:{self.port}/0?deadline_s=5{query}"


MakeServer = Callable[..., TlsServer]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def make(authority: Authority) -> Iterator[MakeServer]:
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    made: list[TlsServer] = []

    def make(cert: Path | None = None, key: Path | None = None, **more: bool) -> TlsServer:
        files = authority.issue("server") if cert is None or key is None else (cert, key)
        made.append(TlsServer(authority, *files, **more))
        return made[-1]

    yield make
    for one in made:
        one.server.close()


def use(url: str) -> None:
    """Put a block there, and get it."""

    async def put_and_get() -> None:
        store = find_store(url).make(LAYOUT)
        await store.open()
        try:
            assert await store.put([block_of(0)]) == [PutResult.STORED]
            assert await fetch(store, [0, 1]) == [True, False]
            assert await store.delete([block_of(0).block_hash]) == 1
        finally:
            await store.close()

    asyncio.run(put_and_get())


def refusal(url: str) -> str:
    with pytest.raises(StoreError) as error:
        use(url)
    return str(error.value)


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_a_server_that_the_authority_has_signed(make: MakeServer, authority: Authority, scheme: str) -> None:
    server = make()
    use(server.url(f"&tls_ca={authority.ca}", scheme=scheme))
    use(server.url(f"&tls_ca={authority.ca}&max_bytes=1MiB", scheme=scheme, host="localhost"))


def test_a_server_that_nobody_knows_is_not_spoken_to(make: MakeServer, tmp_path: Path) -> None:
    server = make()
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(server.url())
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(server.url(f"&tls_ca={Authority(tmp_path / 'other').ca}"))


def test_a_certificate_of_another_name_is_not_taken(make: MakeServer, authority: Authority) -> None:
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(make().url(f"&tls_ca={authority.ca}", host="127.0.0.2"))


def test_a_certificate_whose_time_is_over_is_not_taken(make: MakeServer, authority: Authority) -> None:
    assert "expired" in refusal(make(*authority.expired()).url(f"&tls_ca={authority.ca}"))


def test_a_server_that_asks_for_certificates(make: MakeServer, authority: Authority, tmp_path: Path) -> None:
    server = make(asks_clients=True)
    cert, key = authority.issue("client")
    use(server.url(f"&tls_ca={authority.ca}&tls_cert={cert}&tls_key={key}"))
    assert "cannot reach the server" in refusal(server.url(f"&tls_ca={authority.ca}"))
    cert, key = Authority(tmp_path / "stranger").issue()
    assert "cannot reach the server" in refusal(server.url(f"&tls_ca={authority.ca}&tls_cert={cert}&tls_key={key}"))


def test_without_tls_a_server_that_wants_it_is_an_error(make: MakeServer) -> None:
    assert "cannot reach the server" in refusal(make().url(scheme="valkey"))


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("tls_ca=/no/such/file", "tls_ca /no/such/file: there is no such file"),
        ("tls_cert=/no/such/file", "tls_cert /no/such/file: there is no such file"),
        ("tls_key={ca}", "tls_key needs tls_cert"),
    ],
)
def test_files_that_are_of_no_use_are_named_at_start(authority: Authority, query: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        find_store(f"valkeys://host?{query}".replace("{ca}", str(authority.ca)))


def test_a_certificate_with_its_key_in_one_file(make: MakeServer, authority: Authority) -> None:
    cert, key = authority.issue("client")
    cert.write_text(cert.read_text() + key.read_text())
    use(make(asks_clients=True).url(f"&tls_ca={authority.ca}&tls_cert={cert}"))


def test_passwords(make: MakeServer, authority: Authority, tmp_path: Path) -> None:
    server, ca = make(), f"&tls_ca={authority.ca}"
    server.server.send(f'CONFIG SET requirepass "{PASSWORD}"\r\n'.encode())
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    use(server.url(ca, user=f":{QUOTED}@"))
    use(server.url(f"{ca}&password_file={file}"))
    for url in (server.url(ca), server.url(ca, user=":geraten@")):
        told = refusal(url)
        assert "password" in told
        assert "geraten" not in told


def test_users(make: MakeServer, authority: Authority) -> None:
    server, ca = make(), f"&tls_ca={authority.ca}"
    server.server.say("ACL", "SETUSER", "ferry", "on", ">secret", "~kvferry:*", "+@all")
    server.server.say("ACL", "SETUSER", "default", "off")
    use(server.url(ca, user="ferry:secret@"))
    use(server.url(f"{ca}&max_bytes=1MiB", user="ferry:secret@"))
    assert "password" in refusal(server.url(ca, user="ferry:other@"))


def test_a_password_over_a_socket(tmp_path: Path, make: MakeServer) -> None:
    server, file = make(), tmp_path / "password"
    server.server.send(b"CONFIG SET requirepass geheim\r\n")
    file.write_text("geheim")
    use(f"{server.server.url}?password_file={file}")
    assert "password" in refusal(server.server.url)
