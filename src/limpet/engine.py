"""The engine protocol: a map and a log behind eight primitives.

The map holds the current entries of a namespace; the log holds the ordered changes that
made it. An engine stores both, runs a batch under its own exclusion by the rules of
`limpet.transition`, and tells what changed. Everything else is written once, above it.

Each line of a Behaviour list is a test in `limpet.conformance` with the same words.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, get_args, runtime_checkable
from urllib.parse import parse_qsl, unquote

import msgspec

from limpet.clock import Clock, call_on, has_loop, wake
from limpet.errors import InvalidValue, LimpetError, Unavailable
from limpet.index import Sought
from limpet.keys import Span
from limpet.model import (
    Batch,
    Commit,
    Entry,
    Expire,
    Family,
    Feed,
    Filter,
    Guard,
    Refusal,
    Slice,
    Status,
    Traits,
    Window,
    Write,
)
from limpet.sealing import Keyring, Resealed, Seals, find_keyring

__all__ = [
    "PAUSE_S",
    "SCAN_CALLS",
    "Address",
    "Bell",
    "Budget",
    "Engine",
    "Indexing",
    "Restoring",
    "Sealing",
    "Undone",
    "is_made_here",
    "may_be_of_one",
    "new_request_id",
    "not_committed",
    "open_engine",
    "seal_engine",
]

SCAN_CALLS: Final = 25
"""What a scan counts in a budget: as many calls as reading its entries one by one might take."""

PAUSE_S: Final = 0.0005
"""How long calls that never suspend pause for another thread of their engine."""


class Engine(Protocol):
    """Where state lives. Every call names its namespace; nothing crosses it."""

    @property
    def traits(self) -> Traits:
        """What this engine is, where engines may differ."""
        ...

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """Read entries by key, in the order asked.

        Behaviour:
        - A read sees every commit that was acknowledged before it began.
        - An expired entry reads as absent, swept or not.
        - Several keys in one read come from one moment.
        """
        ...

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
    ) -> Slice:
        """Read live entries of a span in key order, at most ``limit`` of them.

        Behaviour:
        - Order is code-point order of the keys.
        - A slice that ends early says where to go on; a slice without a cursor was the last.
        - Without values, entries come with their numbers and times alone.
        """
        ...

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """Apply a batch entirely or not at all.

        Behaviour:
        - Guards see the state before the batch.
        - A refused batch leaves no trace: no change, no event, no revision.
        - Each change has its own revision, growing in the order of the writes.
        - Revisions may skip; nobody may count on density.
        - A refusal carries the entry found, so the caller need not read again.
        - A request seen before answers with its first result and changes nothing.
        - A request that arrives after its own retry was answered does nothing.
        - A commit writes several families together; the same key in two of them is two entries.
        - Batches that are committed together have an outcome each: one that cannot be committed fails no other.
        - A brief batch does the same, and is told the same, but that entries of records may lack their value.
        """
        ...

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> Feed:
        """Read the log after a revision, in revision order; wait for news when there is none.

        With a span, only the data of its keys; without, all families. With a limit of 0, none at all: then it is
        asked what they would follow.

        Behaviour:
        - When a revision is readable, every smaller one is readable or will never exist.
        - A revision that was trimmed, or that lies in the future, is refused as compacted.
        - A wait ends early when a change arrives, from this process or another.
        - A feed names the change that it follows: that of the revision asked for, or the last one before it.
        """
        ...

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """The entries whose time has come, receipts aside, as the writes that end them.

        Behaviour:
        - An entry is due from the millisecond it expires, and not before.
        - Asking changes nothing; two who ask get the same answer.
        """
        ...

    async def trim(self, namespace: str, window: Window) -> int:
        """Drop what the log need not keep any more, and receipts past their time. Returns changes dropped.

        Behaviour:
        - The oldest changes go first, and what is younger than the minimum stays.
        - Trimming moves the floor, so that a watcher behind it is told.
        """
        ...

    async def status(self, namespace: str) -> Status:
        """The namespace at a glance; one that was never written has revision 0.

        Behaviour:
        - The revision is that of the latest change.
        - Keys and bytes count what is stored.
        - Its time is what decides about expiry, and never goes back.
        - It tells by how much the engine's clock is behind that time, which stands still for so long.
        """
        ...

    async def close(self) -> None:
        """Let go of files and connections. Safe to call twice.

        Behaviour:
        - Commits that began are finished; later calls raise Closed.
        - Whoever waits for changes is woken and told.
        """
        ...


@runtime_checkable
class Indexing(Protocol):
    """What an engine can do beside its primitives where it pays: find entries by a field without reading them all.

    Behaviour:
    - An index changes no answer of a scan, only how long it takes.
    - It holds what was written before it was made and what is written after, by whomever.
    - Making one that there is, or dropping one that there is not, changes nothing.
    """

    async def index(self, namespace: str, field: str) -> None:
        """Keep an index of a field from now on."""
        ...

    async def unindex(self, namespace: str, field: str) -> None:
        """Keep it no more."""
        ...

    async def indexes(self, namespace: str) -> list[str]:
        """The fields that have an index, in their order."""
        ...

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[Sought]) -> list[str] | None:
        """The keys of a span that an index finds, in any order; None when there is none to help, or it finds too many.

        Each of ``wanted`` finds all that match; so one of them is enough.
        """
        ...


@runtime_checkable
class Sealing(Protocol):
    """What an engine can do beside its primitives where values are encrypted: tell of its keys, and change them."""

    @property
    def key_id(self) -> str:
        """The id of the key that seals what is written now."""
        ...

    async def reseal(self, namespace: str, *, after: str | None = None, limit: int = 500) -> Resealed:
        """Seal with the current key what is sealed with another, or not at all; go on behind a cursor."""
        ...

    async def seals(self, namespace: str) -> list[Seals]:
        """How much is sealed with which key, the current one first."""
        ...


@runtime_checkable
class Restoring(Protocol):
    """What an engine can do beside its primitives after its data was put back from a backup: leave the past behind.

    What was read, seen and locked in the time that the backup does not know has revisions that would be used again.

    Behaviour:
    - In a new epoch every position of the old one is Compacted.
    - In a new epoch no revision and no token is given that an earlier one may have given.
    - A new epoch changes no entry, and the log goes on.
    """

    async def raise_epoch(self, skip: int) -> int:
        """Begin a new epoch, in which each namespace leaves out so many revisions. Returns the epoch."""
        ...


class Address(msgspec.Struct, frozen=True):
    """An engine's URL, taken apart. Its text form never shows a password."""

    url: str
    scheme: str
    path: str
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str) -> Address:
        """Take a URL apart."""
        if not isinstance(url, str):
            raise InvalidValue(
                f"an engine is named by a URL such as 'sqlite:///state.db', not by a {type(url).__name__}"
            )
        if "\0" in url or any("\ud800" <= letter <= "\udfff" for letter in url):
            raise InvalidValue("an engine URL holds no U+0000 and no lone surrogate")
        scheme, colon, rest = url.partition(":")
        if not colon or not scheme:
            raise InvalidValue(
                f"{_without_password(url)!r} is not an engine URL: try 'sqlite:///state.db' or 'memory:'"
            )
        # SQLAlchemy's URLs name a driver behind a plus. Ours is fixed, so the name changes nothing.
        engine, plus, _ = scheme.partition("+")
        if plus and engine.lower() in _WITH_DRIVER:
            return cls.parse(f"{engine}:{rest}")
        # A password may hold a question mark; what follows it up to the last @ is no option.
        credentials, at, place = rest.rpartition("@")
        path, _, query = place.partition("?")
        body = credentials + at + path
        options = dict(parse_qsl(query, keep_blank_values=True))
        return cls(url, scheme.lower(), unquote(body), options)

    def take(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """An option of the URL that must be one of a few words."""
        found = self.options.get(name, default).lower()
        if found not in allowed:
            raise InvalidValue(f"{self}: {name} is one of {', '.join(allowed)}")
        return found

    def allow(self, *names: str) -> None:
        """Refuse options nobody reads: a misspelt one would be silently without effect."""
        for name in self.options:
            if name not in names:
                raise InvalidValue(f"{self}: unknown option {name!r}, known: {', '.join(names) or 'none'}")

    def without(self, name: str) -> Address:
        """The same address without an option."""
        if name not in self.options:
            return self
        credentials, at, place = self.url.rpartition("@")
        path, _, query = place.partition("?")
        kept = "&".join(each for each in query.split("&") if each.partition("=")[0] != name)
        return Address.parse(f"{credentials}{at}{path}{'?' if kept else ''}{kept}")

    def __str__(self) -> str:
        return _without_password(self.url)

    __repr__ = __str__


def _without_password(url: str) -> str:
    """The URL as it may be shown: no credentials and no option's value, however it was misspelt."""
    scheme, colon, rest = url.partition(":")
    credentials, at, place = rest.rpartition("@")
    place = (place if at else credentials + place).partition("?")[0]
    return f"{scheme}{colon}{'//***@' if at else ''}{place}"


Opener = Callable[[Address, Clock], Awaitable[Engine]]

_BUILT_IN: Final = {
    "memory": "limpet.engines.memory",
    "sqlite": "limpet.engines.sqlite",
    "postgresql": "limpet.engines.postgres",
    "redis": "limpet.engines.redis",
    "nats": "limpet.engines.nats",
    "http": "limpet.engines.http",
}
_WITH_DRIVER: Final = ("sqlite", "postgresql", "postgres")
_ALSO: Final = {"postgres": "postgresql", "rediss": "redis", "tls": "nats", "https": "http"}


async def open_engine(url: str, clock: Clock, *, encryption: Keyring | None = None) -> Engine:
    """Open the engine that a URL names, with encryption in front of it where there are keys for it."""
    address = Address.parse(url)
    # First the keys: what is refused for the lack of them has opened nothing.
    keyring = find_keyring(encryption, address.options.get("encryption"))
    if keyring is not None and address.scheme in ("http", "https"):
        raise InvalidValue(
            f"{address}: encryption is the server's, which has the engine: start it with the keys, and open this with "
            "?encryption=off where the environment names keys"
        )
    engine = await _open(address.without("encryption"), clock)
    return engine if keyring is None else seal_engine(engine, keyring, clock)


def seal_engine(engine: Engine, keyring: Keyring, clock: Clock) -> Engine:
    """Put encryption in front of an engine."""
    sealed: Engine = importlib.import_module("limpet.engines.sealed").SealedEngine(engine, keyring, clock)
    return sealed


async def _open(address: Address, clock: Clock) -> Engine:
    """Open the engine of an address. Third parties join through the entry-point group ``limpet.engines``."""
    scheme = _ALSO.get(address.scheme, address.scheme)
    if scheme in _BUILT_IN:
        try:
            opener: Opener = importlib.import_module(_BUILT_IN[scheme]).open
        except ModuleNotFoundError as missing:
            extra = _BUILT_IN[scheme].rpartition(".")[2]
            raise InvalidValue(
                f"the engine of {scheme}: URLs needs {missing.name}: pip install 'limpet[{extra}]'"
            ) from missing
        try:
            return await opener(address, clock)
        except (ValueError, OverflowError):
            # Not what it says: it may quote a part of a password.
            raise InvalidValue(f"{address}: this URL cannot be read, look at its host, port and path") from None
    # Only a scheme that is not built in pays for looking at what is installed.
    import difflib
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group="limpet.engines")}
    if address.scheme in found:
        opener = found[address.scheme].load()
        return await opener(address, clock)
    known = sorted({*_BUILT_IN, *found})
    guess = difflib.get_close_matches(address.scheme, known, n=1)
    hint = f"did you mean {guess[0]!r}? " if guess else ""
    raise InvalidValue(f"unknown engine {address.scheme!r}: {hint}known: {', '.join(known)}")


class Bell:
    """Wakes those who wait for changes of a namespace, in whatever loop or thread they and the writer are.

    A wait names the mark it saw before it looked at the log, so that a change made in
    between is not slept through.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[str, object] = {}
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {}
        self._for_all = object()

    def mark(self, namespace: str) -> object:
        """What the latest ring left: another object after each."""
        return self._marks.get(namespace, self._for_all)

    def ring(self, namespace: str) -> None:
        """Wake everybody who waits for this namespace."""
        # First the mark, then a look at who waits; who waits does it the other way round. So one
        # of the two sees the other, and ringing for nobody needs no lock.
        self._marks[namespace] = object()
        if namespace in self._waiting:
            with self._lock:
                waiting = self._waiting.pop(namespace, ())
            for loop, sleeper in waiting:
                call_on(loop, wake, sleeper)

    def ring_all(self) -> None:
        """Wake everybody, because an engine closes."""
        self._for_all = object()
        self._marks.clear()
        for namespace in list(self._waiting):
            self.ring(namespace)

    async def wait(self, namespace: str, mark: object, timeout_s: float) -> None:
        """Wait until it rings past this mark, or the time is over. Needs a running loop."""
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiting.setdefault(namespace, []).append((loop, sleeper))
        timer = loop.call_later(timeout_s, wake, sleeper)
        try:
            if self.mark(namespace) is mark:
                await sleeper
        finally:
            timer.cancel()
            with self._lock:
                waiting = self._waiting.get(namespace, [])
                if (loop, sleeper) in waiting:
                    waiting.remove((loop, sleeper))
                if not waiting:
                    self._waiting.pop(namespace, None)


class Budget:
    """A fair share of the event loop, and of the interpreter, for calls that never suspend.

    Reads that complete in place would starve every other task of a loop that does nothing
    but read. When a turn of the loop has lasted long enough, each further call waits for the
    next. And where another thread is at work for the engine, it would get the interpreter
    for a moment every five milliseconds only, so then calls pause for a while, with a loop
    or without.
    """

    def __init__(
        self,
        turn_s: float = 0.001,
        calls: int = 25,
        *,
        timer: Callable[[], float] = time.perf_counter,
        others: Callable[[], bool] = lambda: False,
    ) -> None:
        self._turn_s = turn_s
        self._calls = calls
        self._timer = timer
        self._others = others
        self._left = calls
        self._began = 0.0
        self._renewing: asyncio.AbstractEventLoop | None = None

    def spent(self, calls: int = 1) -> bool:
        """Count a call, or one that is worth several. True means: await `renewed` before going on."""
        self._left -= calls
        return self._left < 0 and self._is_over()

    def _is_over(self) -> bool:
        """Whether this turn has lasted long enough. After every so many calls the clock is asked."""
        if self._timer() - self._began > self._turn_s and (has_loop() or self._others()):
            return True
        self._left = self._calls
        return False

    async def renewed(self) -> None:
        """Wait for the next turn of the loop, or until others have had their time."""
        pause_s = PAUSE_S if self._others() else 0.0
        if not has_loop():
            time.sleep(pause_s)  # noqa: ASYNC251 - there is no loop to hold up
            self._renew()
            return
        loop = asyncio.get_running_loop()
        if self._renewing is not loop:
            # Scheduled before this task's own wake-up, so the next turn starts with a full budget.
            self._renewing = loop
            loop.call_later(pause_s, self._renew) if pause_s else loop.call_soon(self._renew)
        await asyncio.sleep(pause_s)

    def _renew(self) -> None:
        self._left = self._calls
        self._began = self._timer()
        self._renewing = None


class _RequestIds:
    """Ids that are unique over processes, at the price of a counter."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.prefix = os.urandom(8).hex()
        self.numbers = itertools.count(1)


_request_ids = _RequestIds()
os.register_at_fork(after_in_child=_request_ids.renew)
_MADE_HERE: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]+(?:\.[0-9]+)?\Z")


def new_request_id() -> str:
    """A new request id, unique over processes."""
    return f"{_request_ids.prefix}-{next(_request_ids.numbers):x}"


class Undone(Exception):
    """Nothing of a group of batches was applied, and one of them may be the reason: each is committed by itself.

    Attributes:
        meaning: What a batch that is committed by itself fails with.
    """

    def __init__(self, meaning: Exception) -> None:
        super().__init__(type(meaning).__name__)
        self.meaning = meaning


def may_be_of_one(error: Exception) -> bool:
    """Whether the error of a group of which nothing was applied may be the fault of one batch in it.

    An error of ours concerns all of them: the place cannot be reached, is closed, or refuses the caller.
    """
    return not isinstance(error, LimpetError)


def not_committed(batch: Batch, error: Exception) -> LimpetError:
    """What the caller of a batch is told that was tried by itself and could not be committed.

    No draft makes a batch that an engine cannot encode, so that this is a batch made by hand or a mistake of ours. An
    error of ours in any case, so that whoever commits in the background handles it like others.
    """
    meaning = error.meaning if isinstance(error, Undone) else error
    if isinstance(meaning, LimpetError):
        meaning.__cause__ = meaning.__cause__ or error.__cause__
        return meaning
    named = [one.key for one in (*batch.writes, *batch.guards) if isinstance(one, _NAMING)]
    about = f"the batch on {named[0]!r}" if named else "the batch"
    made = InvalidValue(f"{about} cannot be committed and nothing changed: {type(meaning).__name__}")
    made.__cause__ = meaning
    return made


_NAMING: Final = (*get_args(Write), Guard)

OVERTAKEN_MS: Final = 3_600_000
"""How long it is known which requests were overtaken by their own retry."""


def overtaken() -> Unavailable:
    """What a first attempt is told that arrives after its retry, when nobody waits for it any more."""
    return Unavailable("this request was overtaken by its own retry")


def may_be_late(batch: Batch) -> bool:
    """Whether a batch is a first attempt that somebody else may have asked for again meanwhile.

    That is one which its sender has named. What leaves a receipt is known by that.
    """
    return batch.request_id is not None and batch.receipt_ms is None and batch.retry_since is None


def is_made_here(request_id: str) -> bool:
    """Whether an id looks like one that was made for a write that was given none."""
    return _MADE_HERE.match(request_id) is not None
