"""Authentication between kvferry's processes: one secret, the keys that are derived from it, and signed requests.

The secret is `KVFERRY_AUTH_TOKEN`, which the processes of a deployment share. It is never sent. Each key is derived
from it for one purpose in one direction (HKDF-SHA256, RFC 5869), and is good for nothing else:

    kv         between D and P              connections on which KV moves (`transport.connection`)
    ranks      between rank 0 and others    connections of ranks that rank 0 has not started (`engine.executor.link`)
    tickets    P → D                        through routers and clients (`core.messages.ticket_seal`)
    markers    P → D                        in a store that they share (`connectors.kv_store.markers`)
    keys       P → D                        records of clients' keys in a store (`store.key_records`)
    proof      server → client              that it holds the secret
    probe      router → instance            what it is, its metrics
    release    router → instance            a hand-off that will not be fetched
    operate    operator → router, instance  everything that needs an admin key
    register   instance → router            that it serves, or is about to leave

A client first sends a `challenge`, and nothing else, to a server (GET /kvferry/challenge). The answer proves that the
server holds the secret, and has its name, which it draws at its start, and its time. Each request is then signed for
that server, purpose, method, target and body; the signature is valid for half a minute, and once. So a signature that
one server receives is of no use at another, and a recorded one is of no use again; SECURITY.md says what is left to
TLS. The time is the server's own: no clocks are compared.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol, cast, get_args

import msgspec

from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import AuthenticationFailed, ConfigError
from kvferry.core.folders.cache_dirs import user_cache_dirs
from kvferry.core.peer_message import PeerMessage
from kvferry.core.settings.environment import AUTH_TOKEN

Purpose = Literal["probe", "release", "operate", "register"]

CHALLENGE_PATH = "/kvferry/challenge"
SCHEME = "Kvferry"
"""The scheme in the `Authorization` header of a signed request."""


MIN_CHARACTERS = 16
"""The shortest secret that is accepted. Any client that can reach a server can test guesses against its proof, so
a secret must not be guessable."""

_EARLY_NS = 10**9
_HINT = f"start all processes of the deployment with the same {AUTH_TOKEN}"


def derive(secret: str, purpose: str) -> bytes:
    """The key for one purpose; empty without a secret."""
    if not secret:
        return b""
    extracted = hmac.digest(b"kvferry", secret.encode(), "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\1", "sha256")


# The client's side.


class Challenge(PeerMessage, frozen=True):
    """A server's answer to a nonce: its name, its time in nanoseconds, and the proof that it holds the secret."""

    server: str
    now_ns: int
    proof: str


class Signer:
    """Signs requests to one server, which has proved that it holds the secret."""

    def __init__(self, secret: str, nonce: str, answer: bytes, clock: Clock = SYSTEM_CLOCK) -> None:
        """`answer`: the server's answer to `nonce`. Raises `AuthenticationFailed`; nothing must be sent then."""
        try:
            challenge = msgspec.json.decode(answer, type=Challenge)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise AuthenticationFailed("it is not a server of kvferry's, or has no token") from error
        if not hmac.compare_digest(
            challenge.proof.encode(), _proof(secret, nonce, challenge.server, challenge.now_ns).encode()
        ):
            raise AuthenticationFailed(f"it does not hold the same token; {_HINT}")
        self._secret, self._server, self._clock = secret, challenge.server, clock
        self._ahead_ns = challenge.now_ns - int(clock.monotonic() * 1e9)

    def sign(self, purpose: Purpose, method: str, target: str, body: bytes = b"") -> str:
        """The `Authorization` header of one request."""
        at = str(int(self._clock.monotonic() * 1e9) + self._ahead_ns)
        claims = [purpose, self._server, at, entropy.token_hex(16), hashlib.sha256(body).hexdigest()]
        return f"{SCHEME} {'.'.join([*claims, _code(derive(self._secret, purpose), claims, method, target)])}"


# The server's side.


class ReplayGuard(Protocol):
    """Remembers which signed requests were used."""

    def use(self, nonce: str, at_ns: int, oldest_ns: int) -> bool:
        """True if the nonce of a request signed at `at_ns` is new. It is remembered until it is older than `oldest_ns`.
        False also if too many are remembered."""


class LocalReplayGuard:
    """The signed requests that were used at this process."""

    max_remembered = 2**16

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        """Nonce → time of its signature; oldest first, except for requests that overtook others."""

    def use(self, nonce: str, at_ns: int, oldest_ns: int) -> bool:
        """True if the nonce is new to this process, and fewer than `max_remembered` are remembered."""
        while self._used and next(iter(self._used.values())) < oldest_ns:
            del self._used[next(iter(self._used))]
        if nonce in self._used or len(self._used) >= self.max_remembered:
            return False
        self._used[nonce] = at_ns
        return True


class Verifier:
    """Proves that the server holds the secret, and checks signatures. `server`: the name of this server, the same in
    all processes that serve one address; they share `used`."""

    lifetime_s = 30.0
    """Lifetime of a signed request, in seconds."""

    def __init__(self, secret: str, server: str, clock: Clock = SYSTEM_CLOCK, used: ReplayGuard | None = None) -> None:
        self._secret, self._server, self._clock, self._used = secret, server, clock, used or LocalReplayGuard()
        self._keys = {purpose: derive(secret, purpose) for purpose in get_args(Purpose)}
        self._since_ns = self._now_ns()

    def answer(self, nonce: str) -> Challenge:
        """The answer to a challenge."""
        now_ns = self._now_ns()
        return Challenge(self._server, now_ns, _proof(self._secret, nonce, self._server, now_ns))

    def check(self, header: str, method: str, target: str) -> tuple[Purpose, str]:
        """The purpose of a request, and the SHA-256 that its body must have, which the reader of the body compares.
        Raises `AuthenticationFailed`."""
        parts = header.removeprefix(f"{SCHEME} ").split(".")
        if len(parts) != 6 or parts[0] not in self._keys or not parts[2].isdecimal():
            raise AuthenticationFailed("the signature of the request cannot be read")
        purpose, server, at, nonce, digest, code = parts
        right = _code(self._keys[purpose], parts[:5], method, target)
        if not hmac.compare_digest(code.encode(), right.encode()):
            raise AuthenticationFailed(f"the request was not signed with this server's token; {_HINT}")
        if server != self._server:
            raise AuthenticationFailed("the request was signed for another server, or before this one was started")
        now_ns, at_ns = self._now_ns(), int(at)
        oldest_ns = now_ns - int(self.lifetime_s * 1e9)
        if not max(oldest_ns, self._since_ns) <= at_ns <= now_ns + _EARLY_NS:
            raise AuthenticationFailed(
                f"the request was signed more than {self.lifetime_s:g} s ago, or before a restart"
            )
        if not self._used.use(nonce, at_ns, oldest_ns):
            raise AuthenticationFailed("the request was used before, or there are too many at once")
        return cast(Purpose, purpose), digest

    def _now_ns(self) -> int:
        return int(self._clock.monotonic() * 1e9)


def _proof(secret: str, nonce: str, server: str, now_ns: int) -> str:
    return _code(derive(secret, "proof"), [nonce, server, str(now_ns)])


def _code(key: bytes, *claims: str | list[str]) -> str:
    return hmac.new(key, msgspec.msgpack.encode(claims), hashlib.sha256).hexdigest()


# Secrets.


def shared_token(needed_by: str = "") -> str:
    """`KVFERRY_AUTH_TOKEN`, empty if it is not set. Raises `ConfigError` if it is too short, or if a flag needs it and
    it is not set."""
    token = os.environ.get(AUTH_TOKEN, "").strip()
    if needed_by and not token:
        raise ConfigError(f"{needed_by} needs {AUTH_TOKEN}: {_HINT}, for instance of openssl rand -hex 32")
    if 0 < len(token) < MIN_CHARACTERS:
        raise ConfigError(f"{AUTH_TOKEN} has {len(token)} characters; it needs {MIN_CHARACTERS}: openssl rand -hex 32")
    return token


def http_secret(admin_keys: Iterable[str] = ()) -> str:
    """The secret from which a process's HTTP keys are derived: the shared token, else an admin key that is long enough,
    else this user's own token. Empty if there is none."""
    long = (key for key in admin_keys if len(key) >= MIN_CHARACTERS)
    return shared_token() or next(long, "") or users_token()


def users_token() -> str:
    """The token in a file that only this user can read, created at first use; empty where no file can be kept. So
    processes of one user on one machine trust each other without any setting."""
    for folder in user_cache_dirs():
        path = folder / "token"
        with suppress(OSError, UnicodeDecodeError):
            if not path.exists():
                _write_once(path, entropy.token_hex(32))
            with path.open(encoding="utf-8") as file:
                info = os.fstat(file.fileno())
                if info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077:
                    return file.read().strip()
    return ""


def fleet_token() -> str:
    """The secret of a fleet's processes: from the environment, the user's own, or a new one."""
    return shared_token() or users_token() or entropy.token_hex(32)


def _write_once(path: Path, text: str) -> None:
    """Write a file atomically, unless it exists."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{entropy.token_hex(8)}")
    try:
        draft.touch(mode=0o600)
        draft.write_text(text, encoding="utf-8")
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
