"""Connections to a Valkey or Redis server: the address, passwords, TLS, and the client's errors as `StoreError`.

The only module of the stores that imports the `valkey` package. Importing this module raises `MissingDependency`
without that package.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from kvferry.core.errors import ConfigError, MissingDependency, StoreError
from kvferry.core.settings.bounds import MAX_SECONDS
from kvferry.core.settings.files import read_whole
from kvferry.core.text import shortened
from kvferry.store.base import StoreBytes, StoreFull, StoreOptions

try:
    import valkey.asyncio as asyncio_valkey
    from valkey import exceptions
    from valkey.asyncio.retry import Retry
    from valkey.backoff import NoBackoff
except ModuleNotFoundError as error:
    raise MissingDependency("store valkey", "valkey", "valkey") from error

COMMAND_S = 30.0
"""Maximum seconds for one batch; a tier's `deadline_s` is shorter."""
CONNECT_S = 3.0
MAX_CONNECTIONS = 64
DAY_S = 86400.0
CLUSTER_HINT = "; add ?cluster=true to the store's URL on all instances, and blocks are spread over the nodes"
ENCODE_HINT = (
    "has a character that must be percent-encoded in a URL (/ is %2F, # is %23, ? is %3F, @ is %40); or use"
    " password_file"
)
_CLUSTER_ERRORS = ("MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT")
_URL_SAFE = re.compile(r"[^/?#\[\]\s]*")
"""A user and a password as they may be in a URL without percent-encoding."""
FULL_HINT = "; raise its maxmemory, or let it evict (maxmemory-policy volatile-lru)"


class ValkeyOptions(StoreOptions, frozen=True, kw_only=True):
    """`max_bytes`: maximum bytes of all blocks of one layout and codec; None: only the server's limit. `cluster`: the
    server is a node of a cluster, and blocks are spread over the nodes; it must be the same on all instances. `ttl_s`:
    seconds after which blocks that are not pinned expire. `password_file`: a file with the password, which is then not
    on command lines. `tls_ca`, `tls_cert`, `tls_key`: PEM files, only for schemes with TLS."""

    max_bytes: StoreBytes | None = None
    ttl_s: Annotated[float, msgspec.Meta(ge=1, le=MAX_SECONDS)] = 7 * DAY_S
    password_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    cluster: bool = False
    is_tls: ClassVar[bool] = False

    def check(self, location: str) -> None:
        """Raise `ConfigError` unless the location is a host and port, or the path of a socket, and the options fit."""
        make_client(location, self)

    def shared_name(self, location: str) -> str:
        """The same name for all servers: there are several ways to one server (with TLS or without, over a network or a
        Unix socket), so that any two locations may be the same server."""
        return "valkey"


class TlsValkeyOptions(ValkeyOptions, frozen=True, kw_only=True):
    """Options of a scheme with TLS."""

    is_tls: ClassVar[bool] = True


def make_client(location: str, options: ValkeyOptions) -> Any:
    """A client of the server at `location`, or of the cluster to which this server belongs. Does not connect yet.
    Raises `ConfigError`."""
    extra: dict[str, Any] = {}
    if options.password_file:
        try:
            extra["password"] = read_whole(Path(options.password_file)).decode().strip()
        except (ConfigError, UnicodeDecodeError) as error:
            raise ConfigError(f"store: password_file: {error}") from error
    if options.is_tls:
        extra |= _tls_files(options) | {"ssl_check_hostname": True}  # else any certificate of the authority would do
    elif options.tls_ca or options.tls_cert or options.tls_key:
        raise ConfigError("store: tls_ca, tls_cert and tls_key are for valkeys:// and rediss://")
    _, at, address = location.rpartition("@")
    if at and address.startswith("/"):
        raise ConfigError("store: the URL names no host; if it is a socket's, put the password into password_file")
    location = location[2:] if location.startswith("///") else location
    is_socket = location.startswith("/") and not location.startswith("//")
    scheme = "unix:" if is_socket else "valkeys:" if options.is_tls else "valkey:"
    url = f"{scheme}//{location}" if scheme == "unix:" else scheme + location
    if scheme != "unix:":
        _check_address(location)
    # None: the limit is COMMAND_S. With the client's own timeout, Python 3.11 can lose a cancellation.
    extra |= {"socket_timeout": None, "socket_connect_timeout": CONNECT_S, "retry": Retry(NoBackoff(), 1)}
    try:
        if options.cluster:
            return _cluster_client(url, extra)
        pool = asyncio_valkey.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=None,  # wait for a free connection as long as the command may take
            **extra,
        )
        return asyncio_valkey.Valkey(connection_pool=pool)
    except ValueError as error:
        raise ConfigError(f"store: {error}") from error


def _cluster_client(url: str, settings: dict[str, Any]) -> Any:
    """A client that finds all nodes of a cluster through the one at `url`. Raises `ConfigError`."""
    if url.startswith("unix:"):
        raise ConfigError("store: the nodes of a cluster are reached over a network: valkey://host:port?cluster=true")
    if url.rpartition("@")[2].partition("//")[2].partition("/")[2] not in ("", "0"):
        raise ConfigError("store: a cluster has database 0 only; leave the number out")
    return asyncio_valkey.ValkeyCluster.from_url(url, max_connections=MAX_CONNECTIONS, **settings)


async def close_client(client: Any) -> None:
    """Close all connections of a client."""
    if isinstance(client, asyncio_valkey.ValkeyCluster):
        await client.aclose()
    else:
        await client.aclose(close_connection_pool=True)


def num_primaries(client: Any) -> int:
    """Number of servers over which blocks are spread, as far as the client has found them."""
    return max(1, len(client.get_primaries())) if isinstance(client, asyncio_valkey.ValkeyCluster) else 1


def _check_address(location: str) -> None:
    """Raise `ConfigError` for an address that the client would misread. It could, for example, take a part of the
    password for the host."""
    if not location.startswith("//"):
        raise ConfigError("store: a server is named as valkey://host:port, or unix:///path/to.socket")
    credentials, _, server = location[2:].rpartition("@")
    if not _URL_SAFE.fullmatch(credentials):
        raise ConfigError(f"store: the user or password for {server} {ENCODE_HINT}")
    port = server.partition("/")[0].rpartition("]")[2].rpartition(":")[2]
    if ":" in server.rpartition("]")[2] and not port.isdecimal():
        raise ConfigError(f"store: the port of a server is a number: valkey://host:6379; a password {ENCODE_HINT}")
    database = server.partition("/")[2]
    if database and not database.isdecimal():
        raise ConfigError(f"store: the database of a server is a number, not {database!r}: valkey://host:port/0")


def _tls_files(options: ValkeyOptions) -> dict[str, str]:
    """The TLS options under the names that the client has for them. Raises `ConfigError` for mistakes that the client
    would ignore."""
    for name in ("tls_ca", "tls_cert", "tls_key"):
        path = getattr(options, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"store: {name} {path}: there is no such file")
    if options.tls_key and not options.tls_cert:
        raise ConfigError("store: tls_key needs tls_cert, the certificate that it belongs to")
    key = options.tls_key or options.tls_cert  # which may contain both
    files = {"ssl_ca_certs": options.tls_ca, "ssl_certfile": options.tls_cert, "ssl_keyfile": key}
    return {name: path for name, path in files.items() if path}


@asynccontextmanager
async def translated_errors(where: str, *, in_cluster: bool = False) -> AsyncIterator[None]:
    """Limit the body to `COMMAND_S`, and raise the client's exceptions as `StoreError`, or as `StoreFull` if the server
    has no memory. `where`: the server's address, for messages. `in_cluster`: the client is a cluster's."""
    try:
        async with asyncio.timeout(COMMAND_S):
            yield
    except (TimeoutError, exceptions.TimeoutError) as error:
        raise StoreError(f"the server at {where} does not answer") from error
    except exceptions.AuthenticationError as error:
        raise StoreError(f"the server at {where} refuses the password: {error}") from error
    except (exceptions.ConnectionError, OSError) as error:
        raise StoreError(f"cannot reach the server at {where}: {error}") from error
    except exceptions.ValkeyClusterException as error:
        raise StoreError(f"the cluster of the node at {where}: {shortened(str(error), 300)}") from None
    except exceptions.ValkeyError as error:
        message = shortened(str(error).rpartition("caused error: ")[2], 300)  # what is before it is the whole command
        if isinstance(error, exceptions.AskError | exceptions.ClusterDownError) or message.startswith(_CLUSTER_ERRORS):
            if in_cluster:
                raise StoreError(f"the cluster of the node at {where}: {message or error}") from None
            raise StoreError(f"the server at {where} is a node of a cluster ({message}){CLUSTER_HINT}") from None
        if isinstance(error, exceptions.OutOfMemoryError) or "maxmemory" in message:
            raise StoreFull(f"the server at {where} is full: {message}{FULL_HINT}") from None
        raise StoreError(f"the server at {where}: {message}") from None
