"""What can go wrong, sorted by what the caller can do about it.

    LimpetError
    ├── RequestError        fix the request: nothing changed, and repeating it will not help
    │   ├── InvalidKey  InvalidNamespace  InvalidValue  InvalidTTL
    │   ├── ValueTooLarge  TypeMismatch
    │   └── PermissionDenied
    ├── StateError          reload and decide: the store is not as the caller believed
    │   ├── Conflict  NotFound
    │   ├── LockHeld  LockNotHeld  LockExpired  LockLost
    │   └── Compacted
    ├── TransientError      try again later: not applied, and it will pass
    │   └── Unavailable  Contention  RateLimited
    ├── Ambiguous           call `store.outcome(request_id)`: it may have been applied, once
    └── BrokenError         give up and investigate: this handle cannot go on
        └── Corrupt  Closed

The twenty leaves are disjoint. Each has a stable ``code``, used on every wire;
``retryable``, whether trying again can help; and ``outcome``, what is known of the
write. A message names the subject, what was expected, what was found and what to do
next. It never holds a value, which may be a secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from limpet.merge import Clash
    from limpet.model import Entry

__all__ = [
    "Ambiguous",
    "BrokenError",
    "Closed",
    "Compacted",
    "Conflict",
    "Contention",
    "Corrupt",
    "InvalidKey",
    "InvalidNamespace",
    "InvalidTTL",
    "InvalidValue",
    "LimpetError",
    "LockExpired",
    "LockHeld",
    "LockLost",
    "LockNotHeld",
    "NotFound",
    "Outcome",
    "PermissionDenied",
    "RateLimited",
    "RequestError",
    "StateError",
    "TransientError",
    "TypeMismatch",
    "Unavailable",
    "ValueTooLarge",
]

CLASHES_SHOWN: Final = 3

Outcome = Literal["rejected", "unavailable", "unknown", "broken"]


class LimpetError(Exception):
    """The root of everything Limpet raises on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    outcome: ClassVar[Outcome] = "rejected"

    def __reduce__(self) -> tuple[Any, ...]:
        # By default Exception calls the constructor with the message alone,
        # which our keyword arguments do not allow.
        return _rebuild, (type(self), self.args, self.__dict__)

    def public_fields(self) -> dict[str, Any]:
        """The names and numbers that a server sends beside the message. A stored value is never among them."""
        return {name: field for name in _PUBLIC if (field := getattr(self, name, None)) is not None}

    def reveal_if(self, may_see: Callable[[str], bool]) -> None:
        """Let an error that has found a value include it in `public_fields`, if the caller may see that key."""


_PUBLIC: Final = (
    *("key", "field", "expected", "path", "name", "holder", "token", "remaining", "oldest", "attempts", "request_id"),
    *("size_bytes", "limit_bytes", "retry_after"),
)


def _rebuild(kind: type[LimpetError], args: tuple[Any, ...], state: dict[str, Any]) -> LimpetError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _quote(name: str) -> str:
    """Format a key for a message: quoted, escaped, and never longer than a line."""
    shown = repr(name)
    return shown if len(shown) <= 120 else f"{shown[:116]}...'"


class RequestError(LimpetError):
    """The request cannot be granted as it is. Nothing changed."""


class InvalidKey(RequestError):
    """A key, field name, lock name or request id breaks the grammar of keys."""

    code = "invalid_key"

    def __init__(self, key: object, problem: str) -> None:
        shown = _quote(key) if isinstance(key, str) else f"of type {type(key).__name__}"
        super().__init__(f"key {shown} is not allowed: {problem}")
        self.key = key if isinstance(key, str) else None


class InvalidNamespace(RequestError):
    """A namespace is not 1 to 100 of ``a-z 0-9 _ -``."""

    code = "invalid_namespace"

    def __init__(self, name: object) -> None:
        shown = _quote(name) if isinstance(name, str) else f"of type {type(name).__name__}"
        super().__init__(f"namespace {shown} is not allowed: use 1 to 100 characters of a-z, 0-9, '_' and '-'")


class InvalidValue(RequestError):
    """A value, argument or batch is outside what the contract stores."""

    code = "invalid_value"

    def __init__(self, problem: str, *, path: str | None = None, key: str | None = None) -> None:
        super().__init__(problem if path is None else f"{problem} at {path}")
        self.path, self.key = path, key


class InvalidTTL(RequestError):
    """A time to live is not a positive, finite number of seconds."""

    code = "invalid_ttl"

    def __init__(self, problem: str) -> None:
        super().__init__(f"ttl {problem}; give seconds above zero or a timedelta, or None for never")


class ValueTooLarge(RequestError):
    """A value, a record, a meta or a whole batch is over its limit."""

    code = "value_too_large"

    def __init__(self, key: str, *, size_bytes: int, limit_bytes: int, what: str = "value") -> None:
        super().__init__(
            f"{what} for {_quote(key)} is {size_bytes:,} bytes, limit {limit_bytes:,}: "
            "store a reference to it, or split it over several keys"
        )
        self.key, self.size_bytes, self.limit_bytes = key, size_bytes, limit_bytes


class TypeMismatch(RequestError):
    """The key holds another kind of value than the operation needs, or data that is not Limpet's."""

    code = "type_mismatch"

    def __init__(self, key: str, *, expected: str, found: str, path: str | None = None) -> None:
        super().__init__(f"{_quote(key)} holds {found}, and this needs {expected}")
        self.key, self.expected, self.found, self.path = key, expected, found, path


class PermissionDenied(RequestError):
    """The credentials do not allow this."""

    code = "permission_denied"


class StateError(LimpetError):
    """The store is not in the state the caller believed. Reload, then decide."""


class Conflict(StateError):
    """A guard did not hold, or a request id came back with another request.

    Attributes:
        key: The key whose guard failed.
        expected: What the caller expected, in words.
        actual_version: The version found, or None when the key does not exist.
        actual_revision: The revision found, or None when the key does not exist.
        current: The entry found, or None.
        reason: ``"guard"`` or ``"stale_request"``.
        clashes: Of an `edit`, the members that another writer has changed to other values, each with ``path``,
            ``base``, ``mine`` and ``theirs``.
    """

    code = "conflict"

    def __init__(
        self,
        key: str,
        *,
        expected: str,
        current: Entry | None,
        reason: Literal["guard", "stale_request"] = "guard",
        clashes: Sequence[Clash] = (),
    ) -> None:
        if clashes:
            shown = ", ".join(_quote(".".join(("$", *clash.path))) for clash in clashes[:CLASHES_SHOWN])
            more = f" and {len(clashes) - CLASHES_SHOWN} more" if len(clashes) > CLASHES_SHOWN else ""
            text = (
                f"conflict on {_quote(key)}: another writer changed {shown}{more} to other values meanwhile. "
                "Nothing was written: edit it again, or decide with on_conflict"
            )
        elif reason == "stale_request":
            text = f"request id {_quote(key)} was used before for another request: make a new id for a new request"
        else:
            found = (
                "the key does not exist"
                if current is None
                else f"found version {current.version} at revision {current.revision}"
            )
            text = f"conflict on {_quote(key)}: expected {expected}, {found}. Reload and retry, or use store.update()"
        super().__init__(text)
        self.key = key
        self.expected = expected
        self.current = current
        self.actual_version = None if current is None else current.version
        self.actual_revision = None if current is None else current.revision
        self.reason = reason
        self.clashes = tuple(clashes)

    def public_fields(self) -> dict[str, Any]:
        """See `LimpetError.public_fields`; with the version and the revision found, which are null where none is."""
        return {**super().public_fields(), "version": self.actual_version, "revision": self.actual_revision}


class NotFound(StateError):
    """There is no such key, and the operation needs one."""

    code = "not_found"

    def __init__(self, key: str) -> None:
        super().__init__(f"{_quote(key)} does not exist")
        self.key = key


class _LockError(StateError):
    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"lock {_quote(name)} {text}")
        self.name = name


class LockHeld(_LockError):
    """Another handle holds the lock. Has ``holder``, ``token`` and ``remaining`` seconds."""

    code = "lock_held"

    def __init__(self, name: str, *, holder: str, token: int, remaining: float) -> None:
        super().__init__(name, f"is held by {holder} for another {remaining:.1f} s (token {token})")
        self.holder, self.token, self.remaining = holder, token, remaining


class LockNotHeld(_LockError):
    """This handle does not hold the lock: it never acquired it, or released it."""

    code = "lock_not_held"

    def __init__(self, name: str) -> None:
        super().__init__(name, "is not held by this handle: acquire it first")


class LockExpired(_LockError):
    """This handle held the lock, and its lease is over."""

    code = "lock_expired"

    def __init__(self, name: str, *, token: int) -> None:
        super().__init__(name, f"expired; token {token} is stale, acquire it again before going on")
        self.token = token


class LockLost(_LockError):
    """The lock was lost while it was needed: a fenced write was refused, or its body ended."""

    code = "lock_lost"

    def __init__(self, name: str, *, token: int) -> None:
        super().__init__(name, f"was lost; token {token} is stale, stop writing")
        self.token = token


class Compacted(StateError):
    """The log no longer (or not yet) holds the given position. Start again with ``initial=True``."""

    code = "compacted"

    def __init__(self, problem: str, *, oldest: int | None = None) -> None:
        super().__init__(f"cannot watch from there: {problem}. Start again with initial=True")
        self.oldest = oldest


class TransientError(LimpetError):
    """Not applied, and it will pass. The store has tried several times already."""

    retryable = True
    outcome = "unavailable"


class Unavailable(TransientError):
    """The engine cannot be reached or cannot serve now."""

    code = "unavailable"


class Contention(TransientError):
    """Too many writers on one key: the bounded retries are spent."""

    code = "contention"

    def __init__(self, key: str, *, attempts: int) -> None:
        super().__init__(
            f"{_quote(key)} changed under {attempts} attempts in a row: try again later, or use add() or set()"
        )
        self.key, self.attempts = key, attempts


class RateLimited(TransientError):
    """A quota is spent for now. Has ``retry_after`` seconds."""

    code = "rate_limited"

    def __init__(self, problem: str, *, retry_after: float) -> None:
        super().__init__(f"{problem}; try again in {retry_after:.1f} s")
        self.retry_after = retry_after


class Ambiguous(LimpetError):
    """The write may have been applied, once, and its receipt could not be read either.

    Later, ``store.outcome(error.request_id)`` gives the result, and so does the same call
    with the same request id.

    Attributes:
        request_id: The id to pass to `outcome`.
        since: A revision below the one that the write may have got.
    """

    code = "ambiguous"
    retryable = True
    outcome = "unknown"

    def __init__(self, problem: str, *, request_id: str | None = None, since: int = 0) -> None:
        super().__init__(problem)
        self.request_id, self.since = request_id, since


class BrokenError(LimpetError):
    """This handle cannot go on."""

    outcome = "broken"


class Corrupt(BrokenError):
    """The stored data cannot be read: damaged, foreign, or of another schema version."""

    code = "corrupt"


class Closed(BrokenError):
    """The store has been closed."""

    code = "closed"

    def __init__(self, problem: str = "the store is closed: open it again") -> None:
        super().__init__(problem)
