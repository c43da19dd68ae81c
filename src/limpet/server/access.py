"""Access: bearer tokens, the rights of each, and how a server learns that one was revoked.

A token reads ``lmp_<id>_<secret>``. The secret is 256 random bits; the store keeps its SHA-256 and never the secret
itself. So many random bits cannot be guessed from their hash, so a slow hash would only slow down the server.

A token has scopes. A scope grants rights on one namespace, or with ``*`` on all but the server's own, for the keys and
locks whose names start with its prefix. A prefix is a string and not a folder: ``team/a`` covers ``team/ab`` too, and
``team/a/`` does not. No right includes another: to see values takes ``read`` and ``reveal``.

Tokens are entries of the server's own namespace. Every server keeps them in memory and follows the log, so that a
token that is revoked anywhere is refused everywhere within moments, and a check needs no request to the engine.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import msgspec

from limpet.clock import ttl_to_ms
from limpet.errors import Closed, Compacted, InvalidValue, NotFound, PermissionDenied, Unavailable
from limpet.keys import Span, check_namespace, prefix_span
from limpet.model import ABSENT, Entry, Event, Synced
from limpet.retry import Outage
from limpet.server.dispatch import OWN_NAMESPACE
from limpet.server.operations import Right
from limpet.server.outcome import quote_name
from limpet.session import Session
from limpet.store import Store

__all__ = [
    "RIGHTS",
    "Bearer",
    "Issued",
    "Scope",
    "Token",
    "Tokens",
    "Unauthenticated",
    "create_token",
    "list_tokens",
    "revoke_token",
    "rotate_token",
]

log = logging.getLogger("limpet.server")

RIGHTS: Final[tuple[Right, ...]] = ("read", "write", "lock", "reveal", "admin")
SCOPES_MAX: Final = 64
TIME_S: Final = 30.0
RETRY_S: Final = 0.5
TRUST_S: Final = 10.0
"""How long the known tokens stay valid while the log of the store cannot be read."""
_NOT_FOLLOWED: Final = "tokens cannot be checked now; try again later"

_PREFIX: Final = "token/"
_FORM: Final = re.compile(r"lmp_([0-9a-f]{12})_[0-9a-f]{64}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}", re.ASCII)
_NO_HASH: Final = "-" * 64
"""As long as a hash, and equal to none."""


class Unauthenticated(PermissionDenied):
    """The token is missing or not valid. Over HTTP that is a 401, because another token may help."""


# What is stored ---------------------------------------------------------------


class Scope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a token grants: rights on a namespace or ``*``, for the names that start with a prefix."""

    namespace: str
    prefix: str = ""
    rights: tuple[Right, ...] = ()

    def check(self) -> Scope:
        """Return the scope if it is valid, or raise `InvalidValue`."""
        if self.namespace != "*" and check_namespace(self.namespace) == OWN_NAMESPACE:
            raise InvalidValue(f"namespace {OWN_NAMESPACE!r} is the server's own: no token opens it")
        prefix_span(self.prefix)
        if not self.rights or set(self.rights) - set(RIGHTS):
            raise InvalidValue(f"a scope has one or more rights of {', '.join(RIGHTS)}")
        return self

    def covers(self, namespace: str, right: Right, span: Span | None) -> bool:
        """Whether all of a span lies in this scope."""
        if right not in self.rights or self.namespace not in ("*", namespace):
            return False
        own = _span_of(self.prefix)
        if span is None:
            return True
        ends_inside = own.stop is None or (span.stop is not None and span.stop <= own.stop)
        return own.start <= span.start and ends_inside


# A request looks at the scopes of its token about five times.
_span_of: Final = functools.lru_cache(maxsize=1024)(prefix_span)


class Former(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The secret before the last rotation, and until when it is still valid."""

    hash: str
    until_ms: int

    def __repr__(self) -> str:
        return f"Former(until_ms={self.until_ms})"


# If an older server ignored an unknown member, it might grant more than a newer server meant.
class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token as it is stored: everything but its secret."""

    name: str
    hash: str
    scopes: tuple[Scope, ...]
    created_ms: int
    expires_ms: int | None = None
    former: Former | None = None

    def __repr__(self) -> str:
        return f"Token({self.name!r})"

    def accepts(self, digest: str, now_ms: int) -> str | None:
        """None if this digest of a secret is valid now, else the reason. Takes the same time in either case."""
        former = self.former
        is_present = hmac.compare_digest(digest, self.hash)
        is_former = hmac.compare_digest(digest, _NO_HASH if former is None else former.hash)
        if not is_present and not is_former:
            return "wrong secret"
        if self.expires_ms is not None and now_ms >= self.expires_ms:
            return "expired"
        if not is_present and former is not None and now_ms >= former.until_ms:
            return "rotated"
        return None


# Stands in for an unknown id, so that the comparison takes the same time.
_UNKNOWN_TOKEN: Final = Token("unknown", _NO_HASH, (), 0)


class Issued(NamedTuple):
    """A new token with its secret, which is known at this moment only."""

    id: str
    token: Token
    secret: str

    def __repr__(self) -> str:
        return f"Issued({self.id}, {self.token!r})"


# Issuing them -----------------------------------------------------------------


async def create_token(
    store: Store, name: str, scopes: Sequence[Scope], *, expires: float | timedelta | None = None
) -> Issued:
    """Make a token. Its secret is in the result and nowhere else.

    Args:
        store: The server's own namespace, `OWN_NAMESPACE`.
        name: Who it is for, as logs will show: letters, digits and ``. _ @ -``.
        scopes: What it grants.
        expires: After how many seconds it expires, by the engine's clock; None for never.
    """
    if not _NAME.fullmatch(name):
        raise InvalidValue("a token is named with 1 to 64 letters, digits and . _ @ -")
    if not 1 <= len(scopes) <= SCOPES_MAX:
        raise InvalidValue(f"a token has 1 to {SCOPES_MAX} scopes")
    now_ms = (await store.status()).now_ms
    id = secrets.token_hex(6)
    secret = _new_secret(id)
    token = Token(name, _digest(secret), tuple(scope.check() for scope in scopes), now_ms, _end(now_ms, expires))
    await store.put(_PREFIX + id, msgspec.to_builtins(token), expect=ABSENT)
    return Issued(id, token, secret)


async def list_tokens(store: Store) -> dict[str, Token]:
    """All tokens by their ids, those that have expired included."""
    entries = [entry async for entry in store.scan(_PREFIX)]
    return {_id_of(entry.key): token for entry in entries if (token := _token_of(entry)) is not None}


async def revoke_token(store: Store, id: str) -> None:
    """End a token. Every server refuses it within moments. Raises `NotFound`."""
    if not await store.delete(_PREFIX + id):
        raise NotFound(_PREFIX + id)


async def rotate_token(
    store: Store, id: str, *, grace: float | timedelta = 0, expires: float | timedelta | None = None
) -> Issued:
    """Give a token a new secret, and let the present one stay valid for a while.

    Args:
        store: The server's own namespace.
        id: The token.
        grace: For how many seconds the present secret stays valid. The one before it ends at once.
        expires: A new expiry, in seconds from now; without it the expiry stays as it was.
    """
    now_ms = (await store.status()).now_ms
    until_ms = now_ms + (0 if grace == 0 else ttl_to_ms(grace))
    secret = _new_secret(id)

    def rotate(stored: Any) -> Any:
        if stored is None:
            raise NotFound(_PREFIX + id)
        token = msgspec.convert(stored, Token)
        end_ms = token.expires_ms if expires is None else _end(now_ms, expires)
        if end_ms is not None and end_ms <= now_ms:
            raise InvalidValue(f"token {token.name!r} has expired: give it a new expiry, or make another token")
        former = Former(token.hash, until_ms) if until_ms > now_ms else None
        changed = msgspec.structs.replace(token, hash=_digest(secret), expires_ms=end_ms, former=former)
        return msgspec.to_builtins(changed)

    entry = await store.update(_PREFIX + id, rotate)
    assert entry is not None
    return Issued(id, msgspec.convert(entry.value, Token), secret)


def _new_secret(id: str) -> str:
    return f"lmp_{id}_{secrets.token_hex(32)}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _end(now_ms: int, expires: float | timedelta | None) -> int | None:
    return None if expires is None else now_ms + ttl_to_ms(expires)


def _id_of(key: str) -> str:
    return key.removeprefix(_PREFIX)


def _token_of(entry: Entry) -> Token | None:
    """The token of an entry; None if this release cannot read it, so that it grants nothing."""
    try:
        return msgspec.convert(entry.value, Token)
    except msgspec.ValidationError:
        log.warning("token %s cannot be read by this release, and is refused", quote_name(_id_of(entry.key)))
        return None


# Checking them ----------------------------------------------------------------


class Bearer:
    """The caller with a token. See `limpet.server.dispatch.Caller`.

    Attributes:
        name: The token's name and id, for logs.
        writer: The token's name, which its entries and changes have.
        client: The address of the caller, if it is known.
    """

    def __init__(self, tokens: Tokens, id: str, token: Token, digest: str, client: str | None) -> None:
        self.name = f"{token.name}#{id}"
        self.writer = token.name
        self.client = client
        self._tokens = tokens
        self._id = id
        self._token = token
        self._digest = digest

    @property
    def namespace(self) -> str | None:
        """The namespace that the token opens, if it is one alone."""
        names = {scope.namespace for scope in self._token.scopes}
        return min(names) if len(names) == 1 and "*" not in names else None

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        """Whether each of these spans is in a scope of the token; without any, whether the namespace is."""
        if namespace == OWN_NAMESPACE:
            return False
        return all(self._is_covered(namespace, right, span) for span in (spans or (None,)))

    def is_valid(self) -> bool:
        """Whether the token is still valid, with the same scopes: not revoked, expired, or given a new secret."""
        known = self._tokens.find(self._id)
        if known is None or known.scopes != self._token.scopes:
            return False
        return known.accepts(self._digest, self._tokens.now_ms()) is None

    def _is_covered(self, namespace: str, right: Right, span: Span | None) -> bool:
        return any(scope.covers(namespace, right, span) for scope in self._token.scopes)

    def __repr__(self) -> str:
        return f"Bearer({self.name!r})"


class Tokens:
    """All tokens of a store, kept up to date in memory.

    While the log cannot be followed, it is unknown which tokens were revoked. Every caller then gets `Unavailable`,
    and following is tried again until it works.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._store = Store(session, OWN_NAMESPACE)
        self._clock = session.clock
        self._outage = Outage(log, "following the tokens")
        self._changed = asyncio.Event()
        self._known: dict[str, Token] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._broken: Closed | Unavailable | None = Closed("the tokens were not loaded yet")
        self._clock_offset_ms = 0.0

    async def start(self) -> None:
        """Load all tokens, and follow their changes."""
        await self._read_time()
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._follow(loaded), name="limpet-tokens"),
            asyncio.create_task(self._keep_time(), name="limpet-tokens-time"),
        ]
        try:
            await loaded
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop following. From now on every token is refused."""
        self._broken = Closed("the server is closing")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def caller_of(self, token: str | None, client: str | None) -> Bearer:
        """The caller with this token. Raises `Unauthenticated`, with a reason only for the holder of the secret."""
        if self._broken is not None:
            # A new error each time: the traceback of one that is raised again and again would grow.
            raise type(self._broken)(str(self._broken))
        if (self._failing_s() or 0.0) > TRUST_S:
            raise Unavailable(_NOT_FOLLOWED)
        if token is None:
            raise Unauthenticated("this server needs a token")
        form = _FORM.fullmatch(token)
        if form is None:
            raise self._refusal(None, "not a token by its form", client)
        # An unknown id is compared as well, so that the time does not reveal which ids exist.
        known, digest = self._known.get(form[1], _UNKNOWN_TOKEN), _digest(token)
        problem = known.accepts(digest, self.now_ms())
        if problem is not None:
            raise self._refusal(form[1], problem, client, known.name if problem != "wrong secret" else None)
        return Bearer(self, form[1], known, digest, client)

    def find(self, id: str) -> Token | None:
        """The token of an id; None if it is unknown, or if tokens are not followed."""
        return None if self._broken is not None else self._known.get(id)

    @property
    def is_following(self) -> bool:
        """Whether new and revoked tokens reach this server."""
        return self._broken is None and self._failing_s() is None

    def _failing_s(self) -> float | None:
        """For how long the log could not be read; None while it can."""
        since = None if self._session.closed else self._session.hub(OWN_NAMESPACE).failing_since
        return None if since is None else self._clock.monotonic() - since

    async def changed(self) -> None:
        """Wait until a token is made, changed or revoked."""
        await self._changed.wait()

    def now_ms(self) -> int:
        """The engine's time: as it was last read, plus the time that passed on the monotonic clock."""
        return int(self._clock.monotonic() * 1000 + self._clock_offset_ms)

    def _refusal(self, id: str | None, problem: str, client: str | None, name: str | None = None) -> Unauthenticated:
        facts = {"client": client or "-", "token_id": id or "-", "reason": problem}
        log.info(
            "KV access refused: client=%s token=%s reason=%s",
            *(quote_name(fact) for fact in facts.values()),
            extra=facts,
        )
        return Unauthenticated("this token is not valid" if name is None else f"token {name!r} is {problem}")

    async def _follow(self, loaded: asyncio.Future[None]) -> None:
        """Keep the tokens up to date. After any error of the watch, start again and load all of them."""
        while True:
            try:
                await self._watch(loaded)
                error: Exception = Closed()
            except Exception as raised:
                error = raised
            if self._session.closed:
                self._broken = Closed("the server is closing")
                error = self._broken
            if not loaded.done():
                loaded.set_exception(error)
                return
            if isinstance(error, Closed):
                return
            if isinstance(error, Compacted):
                log.warning("tokens are loaded again: the log was trimmed before it was read")
                await self._clock.sleep(RETRY_S)
                continue
            # Revoked tokens could not be distinguished from valid ones.
            self._broken = Unavailable(_NOT_FOLLOWED)
            await self._clock.sleep(self._outage.record_failure(error))

    async def _watch(self, loaded: asyncio.Future[None]) -> None:
        """Load all tokens, then follow. The tokens known before stay valid until all are loaded."""
        known: dict[str, Token] = {}
        async with self._store.watch(f"{_PREFIX}*", initial=True) as events:
            async for event in events:
                if isinstance(event, Synced):
                    self._known, self._broken = known, None
                    self._outage.record_success()
                    if not loaded.done():
                        loaded.set_result(None)
                else:
                    _apply(known, event)
                self._notify()

    def _notify(self) -> None:
        # Present waiters hold the old event; later waiters wait for the next.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _keep_time(self) -> None:
        outage = Outage(log, "reading the time of the engine")
        pause_s = TIME_S
        while True:
            await self._clock.sleep(pause_s)
            try:
                await self._read_time()
            except Closed:
                return
            except Exception as error:
                pause_s = outage.record_failure(error)
            else:
                outage.record_success()
                pause_s = TIME_S

    async def _read_time(self) -> None:
        now_ms = (await self._store.status()).now_ms
        self._clock_offset_ms = now_ms - self._clock.monotonic() * 1000


def _apply(known: dict[str, Token], event: Event) -> None:
    id = _id_of(event.key)
    if event.op in ("put", "patch") and event.entry is not None:
        token = _token_of(event.entry)
        if token is not None:
            known[id] = token
            return
    if event.op != "touch":
        known.pop(id, None)
