"""Sealing the audit trail, verifying it, and pruning it.

One sealer at a time, holding a fenced lock, takes the rows that are new, in the order of their revisions, and makes
them links of one chain. From then on a row cannot be changed, removed or moved without a verification finding it, but
for one way: whoever can write the database and has an older copy of it can put back the older end of the chain, with
the heads of some keys, and leave out rows that came after it. Nothing in the database shows that.

What is outside of it does. An anchor is the end of the chain at some moment. A sealer remembers the latest that it saw
for as long as it runs, refuses to seal a chain that no longer goes through it, and logs it, so that it can be handed to
a verification after a restart.

What is not sealed yet is signed, and counted by the head of its key; a verification tells how much of it there is.

Pruning removes the oldest links, some in each commit, and leaves in the same commit what a verification needs to go on
from there, signed: the last link that was removed, and the last row of each key that had one. So the trail is sound
after each step, and whoever comes after a crash goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Final, Literal, ParamSpec, TypeVar

import msgspec

from limpet.codec import encode_field
from limpet.errors import Closed, Conflict, Corrupt, InvalidValue, LockExpired, LockHeld, LockLost
from limpet.keys import Span, prefix_span
from limpet.lock import Lock
from limpet.model import ABSENT, Condition, Delete, Entry, Family, Guard, Put, Revision, ScanPage, Write
from limpet.retry import Outage
from limpet.semantic.audit import Audit, Head, Keys, Row, Trail, head_key, new_key, read_head, signed
from limpet.store import Store

__all__ = [
    "Problem",
    "Pruned",
    "Report",
    "Sealer",
    "has_trail",
    "prune",
    "record_expiries",
    "rows_of",
    "seal",
    "verify",
]

log = logging.getLogger("limpet.semantic")

LOCK: Final = "limpet/audit"
LOCK_TTL_S: Final = 5.0
"""After how long another goes on where a sealer crashed."""
SEAL_S: Final = 2.0
"""How often the sealer looks. With that, a row is sealed within five seconds."""
ANCHOR_S: Final = 60.0
"""How often the sealer logs the end of a chain that grows."""
ROWS_MAX: Final = 60
STEPS_MAX: Final = 8
PROBLEMS_MAX: Final = 1000

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


# Reading families beside the data ---------------------------------------------------


async def _scan(store: Store, where: str | Span, family: Family, *, values: bool = True) -> AsyncIterator[Entry]:
    """The entries of a family in a span, or whose keys begin so."""
    session = store._session
    span = prefix_span(where) if isinstance(where, str) else where
    while True:
        rest = span

        async def page(part: Span = rest) -> ScanPage:
            return await session.engine.scan(store.name, part, family=family, values=values)

        found = await session.retry(page)
        for entry in found.entries:
            yield entry
        if found.cursor is None:
            return
        span = Span(found.cursor + "\0", rest.stop)
        # Some engines answer in place, and whoever renews the lock of this work needs a turn.
        await session.clock.sleep(0)


async def _read(store: Store, keys: list[str], family: Family) -> list[Entry | None]:
    session = store._session
    return await session.retry(lambda: session.engine.read(store.name, keys, family=family))


async def rows_of(store: Store, *, prefix: str = "") -> AsyncIterator[dict[str, Any]]:
    """The rows of the trail as documents, in the order in which they happened; with a prefix, of keys that begin so.

    A row that is sealed has its number ``seq``. Nothing is verified here.
    """
    # What is new comes first. The other way round, a row that is sealed in between would be in neither.
    fresh = {entry.key: entry async for entry in _scan(store, f"new/{prefix}", "audit")}
    async for entry in _scan(store, "sealed/", "audit"):
        document = entry.value
        fresh.pop(new_key(document["row"]["key"], document["row"]["n"]), None)
        if document["row"]["key"].startswith(prefix):
            yield {
                "seq": document["seq"],
                "revision": document["revision"],
                "at_ms": document["at_ms"],
                **_shown(document["row"]),
            }
    for entry in sorted(fresh.values(), key=lambda one: one.created_revision):
        yield {"seq": None, "revision": entry.created_revision, "at_ms": entry.created_ms, **_shown(entry.value)}


async def has_trail(store: Store) -> bool:
    """Whether a namespace was ever audited. Its rows may all be pruned; the head of a key stays."""
    async for _ in _scan(store, "head/", "audit", values=False):
        return True
    return False


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in row.items() if name not in ("mac", "previous")}


# Sealing --------------------------------------------------------------------------


class _Chain(msgspec.Struct, frozen=True):
    """How long the chain is, and its last link."""

    seq: int = 0
    link: str = ""


async def seal(store: Store, audit: Audit) -> int:
    """Seal the rows that are new. Returns how many this call sealed; none while somebody else is at it."""
    lock = store.lock(LOCK, ttl=LOCK_TTL_S, cancel=False)
    try:
        async with lock:
            return await _seal_under(store, audit.keys, lock)
    except (LockHeld, LockLost, LockExpired):
        return 0


async def _seal_under(store: Store, keys: Keys, lock: Lock) -> int:
    # What was committed up to here is found by the scan. A row of a later revision might be found before one of
    # an earlier, and waits for the next time.
    horizon = (await store.status()).revision
    # By the revisions that made them: a row that was encrypted anew has another since.
    fresh = [(entry.created_revision, entry.key) async for entry in _scan(store, "new/", "audit", values=False)]
    due = [key for revision, key in sorted(fresh) if revision <= horizon]
    for first in range(0, len(due), ROWS_MAX):
        await _settled(_seal_some, store, keys, lock, due[first : first + ROWS_MAX])
    return len(due)


async def _settled(step: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """What a step of whoever holds the lock comes to. Encrypting anew is the one thing that may cross it."""
    for _ in range(STEPS_MAX):
        with contextlib.suppress(Conflict):
            return await step(*args, **kwargs)
    return await step(*args, **kwargs)


async def _seal_some(store: Store, keys: Keys, lock: Lock, due: list[str]) -> None:
    (chain_entry,) = await _read(store, ["chain"], "audit")
    chain = _Chain() if chain_entry is None else msgspec.convert(chain_entry.value, _Chain)
    seq, link = chain.seq, chain.link
    draft = store.batch().fence(lock)
    for entry in await _read(store, due, "audit"):
        if entry is None:
            # Somebody removed it. Its key has one row less than it should, and a verification says so.
            continue
        seq += 1
        document = {"seq": seq, "row": entry.value, "revision": entry.created_revision, "at_ms": entry.created_ms}
        link = keys.digest("link", encode_field([store.name, link, document]))
        draft.include(
            Delete(entry.key, family="audit"),
            Put(_sealed_key(seq), encode_field({**document, "link": link}), family="audit"),
            guards=[Guard(entry.key, Revision(entry.revision), "audit")],
        )
    text = signed(keys, store.name, "chain", {"seq": seq, "link": link})
    condition: Condition = ABSENT if chain_entry is None else Revision(chain_entry.revision)
    draft.include(Put("chain", text, family="audit"), guards=[Guard("chain", condition, "audit")])
    await draft.commit()


def _sealed_key(seq: int) -> str:
    return f"sealed/{seq:016}"


async def record_expiries(store: Store, audit: Audit) -> int:
    """Tell of what expired and was not told of yet. Returns how many rows this call wrote."""
    trail = Trail(store, audit)
    now_ms = (await store.status()).now_ms
    over = [
        entry.key
        async for entry in _scan(store, "live/", "recoverable", values=False)
        if entry.expires_ms is not None and entry.expires_ms - audit.grace_ms <= now_ms
    ]
    told = 0
    for first in range(0, len(over), ROWS_MAX):
        page = over[first : first + ROWS_MAX]
        recoverables = await _read(store, page, "recoverable")
        heads = await trail.heads([name.removeprefix("live/") for name in page])
        for name, recoverable, head in zip(page, recoverables, heads, strict=True):
            if recoverable is None or head is None:
                continue
            if recoverable.meta.get("n") == read_head(head).n:
                told += await trail.record_expiry(name.removeprefix("live/"), head)
                continue
            # The key was written again since, without a time to live.
            with contextlib.suppress(Conflict):
                guard = Guard(name, Revision(recoverable.revision), "recoverable")
                await store.batch().include(Delete(name, family="recoverable"), guards=[guard]).commit()
    return told


class Sealer:
    """Seals the trail of a namespace in the background, and tells of what expired.

    It remembers the end of the chain as it last saw it, and seals nothing once the chain does not go through that any
    more: somebody has put back an older state.

    Args:
        store: The namespace.
        audit: With the keys that sign.
        anchor: What an earlier sealer, or a verification, knew last.
    """

    def __init__(self, store: Store, audit: Audit, *, anchor: str | None = None) -> None:
        self._store = store
        self._audit = audit
        self._task: asyncio.Task[None] | None = None
        self._seen = _parsed(anchor)
        self._logged: _Anchor | None = None
        self._logged_at = -ANCHOR_S

    def start(self) -> None:
        """Begin, on the running loop."""
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="limpet-sealer")

    async def stop(self) -> None:
        """End."""
        task, self._task = self._task, None
        # In a child after a fork, the loop that it was on stayed behind with it.
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def turn(self) -> int:
        """Do what there is to do now. Returns how many rows were sealed.

        Raises:
            Corrupt: The chain does not go through what this sealer saw earlier. Nothing was sealed.
        """
        await self._look()
        await record_expiries(self._store, self._audit)
        # The lock is asked for only when there is something to seal: it would fill the log of an idle namespace.
        async for _ in _scan(self._store, "new/", "audit", values=False):
            sealed = await seal(self._store, self._audit)
            await self._look()
            return sealed
        return 0

    @property
    def anchor(self) -> str | None:
        """The end of the chain as it was last seen; None before there was any."""
        return None if self._seen is None else str(self._seen)

    def remember(self, anchor: str) -> None:
        """Take up the anchor of a verification that found nothing wrong."""
        known = _parsed(anchor)
        if known is not None and (self._seen is None or known.seq >= self._seen.seq):
            self._seen = known

    async def _look(self) -> None:
        """Hold the chain against what was seen of it, and remember its end."""
        seen, name, keys = self._seen, self._store.name, self._audit.keys
        asked = ["chain", "mark", _sealed_key(seen.seq if seen is not None else 0)]
        chain_entry, mark_entry, link_entry = await _read(self._store, asked, "audit")
        chain = _signed_part(keys, name, "chain", chain_entry, _Chain) or _Chain()
        mark = _signed_part(keys, name, "mark", mark_entry, _Mark) or _Mark()
        if seen is not None and (problem := seen.problem_of(chain, mark, link_entry)) is not None:
            log.error(
                "the audit trail of namespace %s went back: %s. It was at %s. Nothing is sealed any more",
                name,
                problem,
                seen,
                extra={"event": "auditRolledBack", "namespace": name, "anchor": str(seen)},
            )
            raise Corrupt(
                f"the audit trail of namespace {name!r} went back: {problem}. Verify it with anchor {seen}; if an "
                "older state was put back on purpose, restart whoever seals it"
            )
        if chain.seq:
            self._seen = _Anchor(chain.seq, mark.seq, chain.link)
            self._log_anchor()

    def _log_anchor(self) -> None:
        """Log the end of the chain: now and then while it grows, and whenever a turn is taken by hand."""
        now = self._store._session.clock.monotonic()
        if self._seen == self._logged or (self._task is not None and now - self._logged_at < ANCHOR_S):
            return
        self._logged, self._logged_at = self._seen, now
        log.info(
            "audit anchor of namespace %s: %s",
            self._store.name,
            self._seen,
            extra={"event": "auditAnchor", "namespace": self._store.name, "anchor": str(self._seen)},
        )

    async def _run(self) -> None:
        clock = self._store._session.clock
        outage = Outage(log, f"sealing of namespace {self._store.name}")
        pause_s = SEAL_S
        while True:
            await clock.sleep(pause_s)
            try:
                await self.turn()
            except Closed:
                return
            except Exception as error:
                pause_s = max(SEAL_S, outage.record_failure(error))
            else:
                outage.record_success()
                pause_s = SEAL_S


# Verifying ------------------------------------------------------------------------

Kind = Literal["altered", "missing", "moved", "unknown", "unaudited", "unreadable", "rolled_back"]


class Problem(msgspec.Struct, frozen=True):
    """Something that is not as it was written.

    Attributes:
        kind: ``altered``, ``missing``, ``moved``, ``unknown``, ``unaudited``, ``unreadable`` or ``rolled_back``.
        place: Which row, which link or which key.
        text: What is wrong with it.
    """

    kind: Kind
    place: str
    text: str


class Report(msgspec.Struct, frozen=True):
    """What a verification found.

    Attributes:
        sealed: How many rows are sealed.
        unsealed: How many are signed and counted, and not sealed yet.
        keys: How many keys have rows.
        pending: How many keys expired and are not told of yet.
        anchor: The end of the chain, and how much of it was pruned, to be kept elsewhere and handed to the next
            verification.
        problems: What is wrong, at most 1,000 of it.
        pruned: How many rows were pruned: the first so many of the chain.
        pruned_to_ms: When the last of those was written; None where nothing was pruned.
    """

    sealed: int
    unsealed: int
    keys: int
    pending: int
    anchor: str
    problems: tuple[Problem, ...]
    pruned: int = 0
    pruned_to_ms: int | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as a document."""
        return {"sound": self.is_sound, **msgspec.to_builtins(self)}


async def verify(
    store: Store, audit: Audit, *, anchor: str | None = None, sealer: Sealer | None = None, wait_s: float = 10.0
) -> Report:
    """Verify the trail of a namespace, and that what it holds is what the trail tells.

    Writers go on meanwhile; sealing waits.

    Args:
        store: The namespace.
        audit: With the keys that signed it.
        anchor: The anchor of an earlier report: the chain must still go through it. If it was pruned beyond that, only
            its length is compared.
        sealer: A sealer of the namespace: the chain must still go through what it saw last, too.
        wait_s: How long to wait for a sealer that is at work.
    """
    verification = _Verification(store, audit, anchor, None if sealer is None else sealer.anchor)
    async with store.lock(LOCK, ttl=LOCK_TTL_S, wait=wait_s):
        report = await verification.run()
    if sealer is not None and report.is_sound:
        sealer.remember(report.anchor)
    return report


class _Last(msgspec.Struct):
    """The last row of a key that was seen so far."""

    n: int = 0
    mac: str | None = None
    after: str | None = None
    revision: int = 0
    at_ms: int = 0


class _Verification:
    def __init__(self, store: Store, audit: Audit, *anchors: str | None) -> None:
        self._store, self._keys = store, audit.keys
        parsed = [_parsed(anchor) for anchor in anchors]
        self._anchors = list(dict.fromkeys(anchor for anchor in parsed if anchor is not None))
        self._problems: list[Problem] = []
        self._heads: dict[str, tuple[Entry, Head]] = {}
        self._fresh: list[Entry] = []
        self._last: dict[str, _Last] = {}
        self.past: dict[str, _Past] = {}
        self.altered: Problem | None = None
        self._mark = _Mark()
        self._chain = _Chain()
        self._sealed = _Chain()
        self._count = self._pending = self._horizon = self.now_ms = 0

    async def run(self, *, with_data: bool = True) -> Report:
        status = await self._store.status()
        # What changes from here on is not held against what was read before.
        self._horizon, self.now_ms = status.revision, status.now_ms
        try:
            # All heads first, in scans of their own: a row that comes while this goes on comes with its head, and one
            # that a head counts is then found. A page is not of one moment on every engine.
            heads = prefix_span("head/")
            for part in (heads, Span("", heads.start), Span(heads.stop or "", None)):
                async for entry in _scan(self._store, part, "audit"):
                    self._look_at(entry)
            self._compare_mark()
            self._end_of_chain()
            self._look_at_fresh()
            for key, (entry, head) in self._heads.items():
                self._compare_head(key, entry, head)
            for key, last in self._last.items():
                if key not in self._heads and last.revision <= self._horizon:
                    self._found("missing", head_key(key), "there are rows of this key and no head")
            if with_data:
                await self._compare_data()
        except Corrupt as error:
            self._found("unreadable", "the store", str(error))
        return Report(
            self._count,
            len(self._fresh),
            len(self._heads),
            self._pending,
            str(_Anchor(self._sealed.seq, self._mark.seq, self._sealed.link)),
            tuple(self._problems),
            self._mark.seq,
            self._mark.at_ms if self._mark.seq else None,
        )

    def _found(self, kind: Kind, place: str, text: str) -> None:
        problem = Problem(kind, place, text)
        if self.altered is None and kind != "unaudited":
            self.altered = problem
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(problem)

    # The trail ----------------------------------------------------------------

    def _look_at(self, entry: Entry) -> None:
        root, _, rest = entry.key.partition("/")
        try:
            if entry.key == "chain":
                self._chain = self._signed(entry, "chain", _Chain) or self._chain
            elif entry.key == "mark":
                self._mark = self._signed(entry, "mark", _Mark) or self._mark
                # It comes before all links.
                self._sealed = _Chain(self._mark.seq, self._mark.link)
            elif root == "past":
                past = self._signed(entry, f"past {rest}", _Past)
                if past is not None:
                    self.past[rest] = past
                    self._last[rest] = _Last(past.n, past.row, past.after, at_ms=past.at_ms)
            elif root == "head":
                head = self._signed(entry, f"head {rest}", Head)
                if head is not None:
                    self._heads[rest] = entry, head
            elif root == "new":
                self._fresh.append(entry)
            elif root == "sealed":
                self._count += 1
                self._look_at_link(entry)
            else:
                self._found("unknown", entry.key, "nothing of this name belongs to the trail")
        except (Corrupt, InvalidValue, msgspec.ValidationError, KeyError, TypeError, AttributeError):
            self._found("altered", entry.key, "it is not of the form that it was written in")

    def _signed(self, entry: Entry, what: str, kind: type[Any]) -> Any:
        """What a document says, if its signature is right."""
        document = self._unsigned(entry.key, what, entry.value)
        return None if document is None else msgspec.convert(document, kind, strict=True)

    def _unsigned(self, place: str, what: str, document: Any) -> dict[str, Any] | None:
        rest = _unsigned(self._keys, self._store.name, what, document)
        if rest is None:
            self._found("altered", place, "its signature is not that of what it says")
        return rest

    def _look_at_link(self, entry: Entry) -> None:
        document = dict(entry.value)
        link, seq = document.pop("link"), document["seq"]
        if {type(seq), type(document["revision"]), type(document["at_ms"])} != {int}:
            raise TypeError
        if entry.key != _sealed_key(seq):
            self._found("moved", entry.key, "it stands where another row was sealed")
            return
        if seq > self._sealed.seq + 1:
            missing = (
                f"{self._sealed.seq + 1}" if seq == self._sealed.seq + 2 else f"{self._sealed.seq + 1} to {seq - 1}"
            )
            self._found("missing", entry.key, f"before it, {missing} of the chain")
        elif not self._keys.matches("link", encode_field([self._store.name, self._sealed.link, document]), link):
            self._found("altered", entry.key, "it is not the link that follows the one before it")
        if any(seq == anchor.seq and link != anchor.link for anchor in self._anchors):
            self._found("rolled_back", entry.key, "it is not the link that the anchor names")
        self._sealed = _Chain(seq, link)
        self._look_at_row(entry.key, document["row"], document["revision"], document["at_ms"])

    def _compare_mark(self) -> None:
        mark = self._mark
        summed = _Sum(self._keys, self._store.name, self.past, mark.keys.partition(":")[0])
        # Without a mark there is no key to make the hash with, and none is no hash that fits.
        if (mark.seq or self.past) and (not mark.keys or summed.digest() != mark.keys):
            self._found("altered", "mark", "what is kept of keys whose rows were pruned is not what it was made with")
        for anchor in self._anchors:
            if anchor.pruned > mark.seq:
                self._found("rolled_back", "mark", f"{mark.seq} rows were pruned, and {anchor.pruned} by the anchor")
            if anchor.seq == mark.seq and anchor.link != mark.link:
                self._found("rolled_back", "mark", "it is not the link that the anchor names")

    def _end_of_chain(self) -> None:
        if self._sealed != self._chain:
            self._found(
                "missing",
                "chain",
                f"the chain ends with {self._sealed.seq}, and {self._chain.seq} rows were sealed",
            )
        for anchor in self._anchors:
            if self._sealed.seq < anchor.seq:
                self._found("rolled_back", "chain", f"it ends before the anchor, which is at {anchor.seq}")

    def _look_at_fresh(self) -> None:
        for entry in sorted(self._fresh, key=lambda one: one.key):
            try:
                document = entry.value
                if entry.key != new_key(document["key"], document["n"]):
                    self._found("moved", entry.key, "it stands where another row was written")
                self._look_at_row(entry.key, document, entry.created_revision, entry.created_ms)
            except (Corrupt, InvalidValue, msgspec.ValidationError, KeyError, TypeError, AttributeError, ValueError):
                self._found("altered", entry.key, "it is not of the form that it was written in")

    def _look_at_row(self, place: str, document: dict[str, Any], revision: int, at_ms: int) -> None:
        unsigned = self._unsigned(place, "row", document)
        if unsigned is None:
            return
        row = msgspec.convert(unsigned, Row)
        last = self._last.setdefault(row.key, _Last())
        if row.n != last.n + 1:
            kind: Kind = "missing" if row.n > last.n + 1 else "moved"
            self._found(kind, place, f"it is row {row.n} of {row.key!r}, and follows row {last.n}")
        elif row.previous != last.mac:
            self._found("altered", place, f"it follows another row {last.n} of {row.key!r}")
        elif row.before != last.after:
            self._found("unaudited", place, f"{row.key!r} was changed by other means before row {row.n}")
        self._last[row.key] = _Last(row.n, document["mac"], row.after, revision, at_ms)

    def _compare_head(self, key: str, entry: Entry, head: Head) -> None:
        last = self._last.get(key, _Last())
        if last.n < head.n:
            self._found("missing", head_key(key), f"{key!r} has {head.n} rows by count, and {last.n} are there")
        elif last.n > head.n:
            if last.revision <= self._horizon:
                self._found("altered", head_key(key), f"{key!r} has more rows than the {head.n} by count")
        elif (head.row, head.after) != (last.mac, last.after):
            self._found("altered", head_key(key), f"the last row of {key!r} is another")

    # The data -----------------------------------------------------------------

    async def _compare_data(self) -> None:
        there: set[str] = set()
        async for entry in self._store.scan("tenant/"):
            there.add(entry.key)
            if entry.revision > self._horizon:
                continue
            found = self._heads.get(entry.key)
            if found is None:
                self._found("unaudited", entry.key, "no row tells of what it holds")
            elif found[0].revision <= self._horizon and (problem := self._difference(entry, found[1])) is not None:
                self._found("unaudited", entry.key, problem)
        for key, (entry, head) in self._heads.items():
            if head.after is not None and key not in there and entry.revision <= self._horizon:
                await self._look_for(key, entry, head)

    def _difference(self, entry: Entry, head: Head) -> str | None:
        if head.after is None or entry.stored is None:
            return "it is there, and its last row tells of its end"
        if self._keys.of_value(self._store.name, entry.key, entry.stored, like=head.after) != head.after:
            return "it holds another value than its last row tells of"
        meta = entry.meta
        # Encrypting anew is a write: of an encrypted store the version may be higher than that of the last row.
        is_version = entry.version == head.version or (self._store.traits.encrypted and entry.version > head.version)
        if (meta.get("lastWriter"), meta.get("semantics")) != (head.writer, head.semantics) or not is_version:
            return "its version, its writer or its semantics are others than its last row tells of"
        return None

    async def _look_for(self, key: str, entry: Entry, head: Head) -> None:
        """An entry that should be there, by its last row."""
        last = self._last.get(key, _Last())
        # The head may have been encrypted anew since, and then says a later time than its last row.
        if head.ttl_ms is not None and min(last.at_ms, entry.updated_ms) + head.ttl_ms <= self.now_ms + 1000:
            self._pending += 1
            return
        (again,) = await _read(self._store, [head_key(key)], "audit")
        if again is not None and again.revision == entry.revision and await self._store.entry(key) is None:
            self._found("unaudited", key, "it is not there, and no row tells of its end")


class _Anchor(msgspec.Struct, frozen=True):
    """The end of a chain, and how many of its links were pruned by then."""

    seq: int
    pruned: int
    link: str

    def __str__(self) -> str:
        return f"{self.seq}{f'/{self.pruned}' if self.pruned else ''}@{self.link}"

    def problem_of(self, chain: _Chain, mark: _Mark, link_entry: Entry | None) -> str | None:
        """Why a chain does not go through this, which was its end once; None when it does.

        ``link_entry`` is what stands where the last link of this was.
        """
        if chain.seq < self.seq:
            return f"it ends with row {chain.seq}"
        if mark.seq < self.pruned:
            return f"{mark.seq} of its rows were pruned, after {self.pruned} were"
        if mark.seq > self.seq:
            return None
        link = mark.link if mark.seq == self.seq else None
        if link is None and link_entry is not None and isinstance(link_entry.value, dict):
            link = link_entry.value.get("link")
        return None if link == self.link else f"row {self.seq} is another, or is gone"


_ANCHOR: Final = re.compile(r"([0-9]{1,18})(?:/([0-9]{1,18}))?@(.*)\Z")


def _parsed(anchor: str | None) -> _Anchor | None:
    if anchor is None:
        return None
    found = _ANCHOR.match(anchor) if type(anchor) is str else None
    if found is None:
        raise InvalidValue("an anchor is what an earlier verification gave: a number or two, @ and a link")
    seq, pruned, link = int(found[1]), int(found[2] or 0), found[3]
    return _Anchor(seq, pruned, link) if seq else None


def _unsigned(keys: Keys, namespace: str, what: str, document: dict[str, Any]) -> dict[str, Any] | None:
    """What a signed document says; None when its signature is not that of what it says."""
    rest = {name: member for name, member in document.items() if name != "mac"}
    return rest if keys.matches(what, encode_field([namespace, rest]), document["mac"]) else None


def _signed_part(keys: Keys, namespace: str, what: str, entry: Entry | None, kind: type[T]) -> T | None:
    """What an entry says that the sealer signed; None when there is none, or when it is not as it was written."""
    try:
        document = None if entry is None else _unsigned(keys, namespace, what, entry.value)
        return None if document is None else msgspec.convert(document, kind)
    except (Corrupt, InvalidValue, msgspec.ValidationError, KeyError, TypeError, AttributeError):
        return None


# Pruning --------------------------------------------------------------------------


class _Mark(msgspec.Struct, frozen=True):
    """Up to where the chain was pruned: so many links, the last of them and its time, and a hash of what is past."""

    seq: int = 0
    link: str = ""
    at_ms: int = 0
    keys: str = ""


class _Past(msgspec.Struct, frozen=True):
    """What is kept of a key whose first rows were pruned: the last of those, in short."""

    n: int
    row: str
    after: str | None
    at_ms: int


class _Sum:
    """A hash of what is kept of all keys whose rows were pruned, of which each can be exchanged by itself.

    Without it, somebody could put back what was kept of one key once, together with its head and its entry. It is a
    sum of keyed hashes, and is stored only as a keyed hash of the sum: whoever knew the terms could look for others
    that come to the same.
    """

    def __init__(self, keys: Keys, namespace: str, past: dict[str, _Past], key_id: str) -> None:
        self._keys, self._namespace, self._key_id = keys, namespace, key_id
        self._past: dict[str, _Past] = {}
        self._total = 0
        self.exchange(past)

    def exchange(self, past: dict[str, _Past]) -> None:
        """Put these in the place of what was kept of the same keys."""
        for key, one in past.items():
            if key in self._past:
                self._total -= self._term(key, self._past[key])
            self._total += self._term(key, one)
            self._past[key] = one

    def digest(self) -> str:
        """The hash."""
        content = encode_field([self._namespace, f"{self._total % 2**256:064x}"])
        return self._keys.digest("pasts", content, self._key_id)

    def _term(self, key: str, past: _Past) -> int:
        content = encode_field([self._namespace, key, msgspec.to_builtins(past)])
        return int(self._keys.digest("past", content, self._key_id).rpartition(":")[2] or "0", 16)


class Pruned(msgspec.Struct, frozen=True):
    """What pruning removed, or would remove.

    Attributes:
        rows: How many rows.
        to_ms: When the last of them was written; None when there was none.
        unaudited: How many of them told of a change by other means before them, which nothing tells of now.
    """

    rows: int
    to_ms: int | None
    unaudited: int


async def prune(
    store: Store,
    audit: Audit,
    *,
    before: datetime | timedelta,
    anchor: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int], None] | None = None,
    wait_s: float = 10.0,
) -> Pruned:
    """Remove the rows that are sealed and older than a moment, and leave a signed mark of where they ended.

    The trail is verified before, because nobody can do that afterwards. Each step is one commit, and leaves a trail
    that is sound. Writers go on meanwhile; sealing waits.

    Args:
        store: The namespace.
        audit: With the keys that signed it.
        before: The moment, or how long ago it was.
        anchor: The anchor of an earlier report, as of `verify`.
        dry_run: Remove nothing, and tell what would be removed.
        progress: Is told after each step how many rows are removed.
        wait_s: How long to wait for a sealer, or for another who prunes.

    Raises:
        Corrupt: The trail is not sound. Nothing was removed.
        LockHeld: Others were at work all the while.
    """
    _check_moment(before)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a function of a number, not something of type {type(progress).__name__}")
    checked = _Verification(store, audit, anchor)
    async with store.lock(LOCK, ttl=LOCK_TTL_S, wait=wait_s) as lock:
        report = await checked.run(with_data=False)
        if (wrong := checked.altered) is not None:
            raise Corrupt(f"nothing was pruned: the trail is not sound. {wrong.place!r}: {wrong.text}")
        summed = _Sum(audit.keys, store.name, checked.past, audit.keys.key_id)
        before_ms = _moment_ms(before, checked.now_ms)
        rows, last, due = 0, "", list[Entry]()
        to_ms: int | None = None
        async for entry in _scan(store, "sealed/", "audit"):
            if entry.value["at_ms"] >= before_ms:
                break
            rows, last, to_ms = rows + 1, entry.key, entry.value["at_ms"]
            if dry_run:
                continue
            due.append(entry)
            if len(due) == ROWS_MAX:
                await _prune_some(store, audit.keys, lock, due, summed)
                due = []
                if progress is not None:
                    progress(rows)
        if due:
            await _prune_some(store, audit.keys, lock, due, summed)
        unaudited = [one for one in report.problems if one.place.startswith("sealed/") and one.place <= last]
        return Pruned(rows, to_ms, len(unaudited))


async def _prune_some(store: Store, keys: Keys, lock: Lock, due: list[Entry], summed: _Sum) -> None:
    """Remove some links, which are the first that there are."""
    past = {
        one.value["row"]["key"]: _Past(
            one.value["row"]["n"], one.value["row"]["mac"], one.value["row"]["after"], one.value["at_ms"]
        )
        for one in due
    }
    summed.exchange(past)
    end = due[-1].value
    mark = _Mark(end["seq"], end["link"], end["at_ms"], summed.digest())
    writes: list[Write] = [
        *(Delete(one.key, family="audit") for one in due),
        *(
            Put(f"past/{key}", signed(keys, store.name, f"past {key}", msgspec.to_builtins(one)), family="audit")
            for key, one in past.items()
        ),
        Put("mark", signed(keys, store.name, "mark", msgspec.to_builtins(mark)), family="audit"),
    ]
    await store.batch().fence(lock).include(*writes).commit()


def _check_moment(before: object) -> None:
    if not isinstance(before, datetime | timedelta):
        raise InvalidValue(
            f"the moment to prune up to is a datetime or a timedelta, not of type {type(before).__name__}"
        )
    if isinstance(before, datetime) and before.tzinfo is None:
        raise InvalidValue("the moment to prune up to has a time zone")


def _moment_ms(before: datetime | timedelta, now_ms: int) -> int:
    if isinstance(before, timedelta):
        return now_ms - round(before.total_seconds() * 1000)
    return round(before.timestamp() * 1000)
