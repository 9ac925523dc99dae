"""Every error that kvferry raises on purpose, in one tree.

    KvferryError
    ├── ConfigError              a flag, file or value that the user can correct
    │   ├── UnknownName          there is no connector, model, policy … of that name; names the nearest one
    │   └── MissingDependency    an optional package is needed; says which extra installs it
    ├── UnsupportedModel         the engine cannot run this model exactly, and so refuses it
    ├── RankLost                 a tensor-parallel rank is lost, and the instance with it
    ├── ConnectorLost            the connector's transfers have ended for all requests, and the instance with them
    ├── RequestError             the answer to a client, with an HTTP status
    │   ├── InvalidRequest       400: a value is wrong; names the field
    │   ├── UnknownModel         404
    │   ├── DeadlineExceeded     400: the request's own deadline passed
    │   ├── GrammarFailed        400: the answer cannot go on under the request's grammar, such as at a limit
    │   ├── RequestAborted       409: an operator aborted the request
    │   ├── QueueFull            429: the queue is full; try again later
    │   ├── RequestFailed        500: an internal error in this request; others are not affected
    │   │   └── LogitsNotFinite  500: the model computed NaN or infinity for it
    │   ├── HandOffFailed        502: the KV of this request could not be loaded, and the policy is `fail`
    │   └── Unavailable          503: shutting down, or no instance to serve it
    ├── LayoutMismatch           the bytes of a block mean different things on the two sides; names the field
    ├── TransferError            KV in motion
    │   ├── ProtocolError        the peer violates the protocol
    │   ├── AuthenticationFailed the peer does not know the shared token
    │   ├── PeerLost             the connection broke
    │   ├── TransferTimeout      the deadline passed first
    │   ├── ChecksumMismatch     what arrived is not what was sent
    │   ├── LeaseEnded           the producer no longer keeps the blocks
    │   └── ChildLost            one of several connectors is lost, and its loads with it
    ├── StoreError               KV at rest: the store cannot be read or written
    └── LeakError                `check()` found a resource that was not released

Exceptions of other libraries are translated into these where they occur, with `raise … from`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KvferryError(Exception):
    """The root of the tree."""


class ConfigError(KvferryError):
    """A setting that the user can correct."""


class UnknownName(ConfigError):
    """The name is unknown; the message contains the nearest known one."""

    def __init__(self, kind: str, name: str, known_names: Iterable[str]) -> None:
        names = sorted(known_names)
        near = get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")
        self.kind, self.name, self.known = kind, name, names


class MissingDependency(ConfigError):
    """An optional package is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs the package {package!r}; install it with: pip install 'kvferry[{extra}]'")


class UnsupportedModel(KvferryError):
    """The engine cannot run this architecture exactly."""


class RankLost(KvferryError):
    """A tensor-parallel rank exited, failed or hangs; the instance cannot continue without it."""


class ConnectorLost(KvferryError):
    """The connector has failed for all requests, or its two sides disagree; the instance cannot continue without it."""


class RequestError(KvferryError):
    """An error that is one request's answer.

    `status` is the HTTP status, `kind` the OpenAI error type, `param` the offending field if there is one.
    """

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param


class InvalidRequest(RequestError):
    """A value of the request is wrong; `param` names the field."""

    status = 400
    kind = "invalid_request_error"


class UnknownModel(RequestError):
    """No such model is served here."""

    status = 404
    kind = "not_found_error"


class RequestAborted(RequestError):
    """An operator aborted the request, so that no other instance should continue it."""

    status = 409
    kind = "request_aborted_error"


class DeadlineExceeded(RequestError):
    """The request's deadline passed before its answer was complete. Not 408 or 504, after which clients try again."""

    status = 400
    kind = "timeout_error"


class GrammarFailed(RequestError):
    """The answer cannot be continued under the request's grammar: a limit was exceeded, or no token is permitted."""

    status = 400
    kind = "invalid_request_error"
    code = "grammar_failed"


class QueueFull(RequestError):
    """The queue is full. `retry_after_s`: when to try again, in seconds."""

    status = 429
    kind = "rate_limit_error"
    retry_after_s = 1


class RequestFailed(RequestError):
    """An internal error, or an error of the machine, while this request was served; the log has the traceback."""

    status = 500
    kind = "server_error"


class LogitsNotFinite(RequestFailed):
    """The logits of a token are not finite: an overflow of the dtype, or damaged weights."""

    kind = "logits_not_finite"


class HandOffFailed(RequestError):
    """The KV of this request could not be fetched and `kv_load_failure_policy` is `fail`."""

    status = 502
    kind = "hand_off_error"


class Unavailable(RequestError):
    """Nothing can serve the request now. `retry_after_s`: when to try again, in seconds."""

    status = 503
    kind = "unavailable_error"
    retry_after_s = 1


_HINTS = {
    "model_fingerprint": "; the weights or the configuration are not the same",
    "kernels": (
        "; the two round otherwise, which shows in answers: use --dtype float32, the same processors and compilers, or"
        " allow it with --mix-kernels (in vLLM: mix_kernels) on all instances"
    ),
}
"""Advice for a difference, by the layout's field."""


class LayoutMismatch(KvferryError):
    """Two layouts that cannot be reconciled; `field` says where they differ."""

    def __init__(self, field: str, local: object, remote: object) -> None:
        hint = _HINTS.get(field, "")
        super().__init__(f"KV layouts differ in {field}: here {local!r}, there {remote!r}{hint}")
        self.field, self.local, self.remote = field, local, remote


class TransferError(KvferryError):
    """A transfer of KV failed."""


class ChildLost(TransferError):
    """One of several connectors has raised and is closed; the others continue."""


class ProtocolError(TransferError):
    """The peer sent something that the protocol does not allow."""


class AuthenticationFailed(TransferError):
    """The peer does not know the shared token."""


class PeerLost(TransferError):
    """The connection to the peer broke."""


class TransferTimeout(TransferError):
    """The deadline passed before the transfer was complete."""


class ChecksumMismatch(TransferError):
    """The bytes that arrived do not have the checksum of the bytes that were sent."""


class LeaseEnded(TransferError):
    """The producer no longer keeps the blocks: they were fetched or released, or the lease ended by time."""


class StoreError(KvferryError):
    """A store cannot be read or written."""


class LeakError(KvferryError):
    """`check()` found a resource that was not released."""
