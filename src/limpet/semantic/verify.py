"""Verifying the audit trail: that no row was changed, removed, added or moved, and that the entries match their rows.

A row that is not sealed yet is signed, and counted by the head of its key; the report counts those rows separately.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from limpet.codec import encode_field
from limpet.errors import Corrupt, InvalidValue
from limpet.keys import Span, prefix_span
from limpet.model import Entry
from limpet.semantic.audit import Audit, Head, Row, head_key, new_key
from limpet.semantic.chain import (
    LOCK,
    LOCK_TTL_S,
    Anchor,
    Chain,
    PrunedKey,
    PrunedKeysHash,
    PruneMark,
    check_signature,
    parse_anchor,
    sealed_key,
)
from limpet.semantic.families import read_family, scan_family
from limpet.semantic.seal import Sealer
from limpet.store import Store

__all__ = ["Report", "TrailProblem", "verify"]

PROBLEMS_MAX: Final = 1000

ProblemKind = Literal["altered", "missing", "moved", "unknown", "unaudited", "unreadable", "rolled_back"]


class TrailProblem(msgspec.Struct, frozen=True):
    """Something in a namespace that is not as it was written.

    Attributes:
        kind: ``altered``, ``missing``, ``moved``, ``unknown``, ``unaudited``, ``unreadable`` or ``rolled_back``.
        place: Which row, which link or which key.
        text: What is wrong with it.
    """

    kind: ProblemKind
    place: str
    text: str


class Report(msgspec.Struct, frozen=True):
    """What a verification found.

    Attributes:
        sealed: How many rows are sealed.
        unsealed: How many are signed and counted, and not sealed yet.
        keys: How many keys have rows.
        pending: How many keys expired and have no row of that yet.
        anchor: The end of the chain, and how much of it was pruned. Keep it elsewhere, and pass it to the next
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
    problems: tuple[TrailProblem, ...]
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
    """Verify the trail of a namespace, and that its entries are as their last rows describe them.

    Writers go on meanwhile; sealing waits.

    Args:
        store: The namespace.
        audit: With the keys that signed it.
        anchor: The anchor of an earlier report: the chain must still go through it. If it was pruned beyond that, only
            its length is compared.
        sealer: A sealer of the namespace: the chain must still go through what it saw last, too.
        wait_s: How long to wait for a sealer that is at work.
    """
    verification = Verification(store, audit, anchor, None if sealer is None else sealer.anchor)
    async with store.lock(LOCK, ttl=LOCK_TTL_S, wait=wait_s):
        report = await verification.run()
    if sealer is not None and report.is_sound:
        sealer.remember(report.anchor)
    return report


class _LastRow(msgspec.Struct):
    """The last row of a key that was read so far."""

    n: int = 0
    mac: str | None = None
    after: str | None = None
    revision: int = 0
    at_ms: int = 0


class Verification:
    """One pass over the trail. The caller of `run` holds the lock of the trail.

    Attributes:
        altered: The first problem of the trail itself; None when it is sound.
        pruned_keys: The last pruned row of each key that has one.
        now_ms: The store's time when the pass began.
    """

    def __init__(self, store: Store, audit: Audit, *anchors: str | None) -> None:
        self._store, self._keys = store, audit.keys
        parsed = [parse_anchor(anchor) for anchor in anchors]
        self._anchors = list(dict.fromkeys(anchor for anchor in parsed if anchor is not None))
        self._problems: list[TrailProblem] = []
        self._heads: dict[str, tuple[Entry, Head]] = {}
        self._fresh: list[Entry] = []
        self._last: dict[str, _LastRow] = {}
        self.pruned_keys: dict[str, PrunedKey] = {}
        self.altered: TrailProblem | None = None
        self._mark = PruneMark()
        self._chain = Chain()
        self._sealed = Chain()
        self._count = self._pending = self._horizon = self.now_ms = 0

    async def run(self, *, with_data: bool = True) -> Report:
        """Read the trail and check it; with ``with_data``, compare the entries with it."""
        status = await self._store.status()
        # Later changes are not compared with what was read before them.
        self._horizon, self.now_ms = status.revision, status.now_ms
        try:
            # Read all heads first, in their own scan. A row that is written meanwhile comes with its head, so each row
            # that a head counts is found afterwards. On some engines the entries of one page are not of one moment.
            heads = prefix_span("head/")
            for part in (heads, Span("", heads.start), Span(heads.stop or "", None)):
                async for entry in scan_family(self._store, part, "audit"):
                    self._check_entry(entry)
            self._check_mark()
            self._check_end_of_chain()
            self._check_fresh()
            for key, (entry, head) in self._heads.items():
                self._check_head(key, entry, head)
            for key, last in self._last.items():
                if key not in self._heads and last.revision <= self._horizon:
                    self._add_problem("missing", head_key(key), "this key has rows and no head")
            if with_data:
                await self._compare_data()
        except Corrupt as error:
            self._add_problem("unreadable", "the store", str(error))
        return Report(
            self._count,
            len(self._fresh),
            len(self._heads),
            self._pending,
            str(Anchor(self._sealed.seq, self._mark.seq, self._sealed.link)),
            tuple(self._problems),
            self._mark.seq,
            self._mark.at_ms if self._mark.seq else None,
        )

    def _add_problem(self, kind: ProblemKind, place: str, text: str) -> None:
        problem = TrailProblem(kind, place, text)
        if self.altered is None and kind != "unaudited":
            self.altered = problem
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(problem)

    # The trail ----------------------------------------------------------------

    def _check_entry(self, entry: Entry) -> None:
        root, _, rest = entry.key.partition("/")
        try:
            if entry.key == "chain":
                self._chain = self._read_signed(entry, "chain", Chain) or self._chain
            elif entry.key == "mark":
                self._mark = self._read_signed(entry, "mark", PruneMark) or self._mark
                # Its key sorts before those of all links.
                self._sealed = Chain(self._mark.seq, self._mark.link)
            elif root == "past":
                pruned = self._read_signed(entry, f"past {rest}", PrunedKey)
                if pruned is not None:
                    self.pruned_keys[rest] = pruned
                    self._last[rest] = _LastRow(pruned.n, pruned.row, pruned.after, at_ms=pruned.at_ms)
            elif root == "head":
                head = self._read_signed(entry, f"head {rest}", Head)
                if head is not None:
                    self._heads[rest] = entry, head
            elif root == "new":
                self._fresh.append(entry)
            elif root == "sealed":
                self._count += 1
                self._check_link(entry)
            else:
                self._add_problem("unknown", entry.key, "the trail has no entry of this name")
        except (Corrupt, InvalidValue, msgspec.ValidationError, KeyError, TypeError, AttributeError):
            self._add_problem("altered", entry.key, "it does not have the form in which it was written")

    def _read_signed(self, entry: Entry, what: str, kind: type[Any]) -> Any:
        """The document of an entry, if its signature matches."""
        document = self._check_signature(entry.key, what, entry.value)
        return None if document is None else msgspec.convert(document, kind, strict=True)

    def _check_signature(self, place: str, what: str, document: Any) -> dict[str, Any] | None:
        rest = check_signature(self._keys, self._store.name, what, document)
        if rest is None:
            self._add_problem("altered", place, "its signature does not match its content")
        return rest

    def _check_link(self, entry: Entry) -> None:
        document = dict(entry.value)
        link, seq = document.pop("link"), document["seq"]
        if {type(seq), type(document["revision"]), type(document["at_ms"])} != {int}:
            raise TypeError
        if entry.key != sealed_key(seq):
            self._add_problem("moved", entry.key, "it is stored under the number of another row")
            return
        if seq > self._sealed.seq + 1:
            missing = (
                f"{self._sealed.seq + 1}" if seq == self._sealed.seq + 2 else f"{self._sealed.seq + 1} to {seq - 1}"
            )
            self._add_problem("missing", entry.key, f"before it, {missing} of the chain")
        elif not self._keys.matches("link", encode_field([self._store.name, self._sealed.link, document]), link):
            self._add_problem("altered", entry.key, "it is not the link that follows the one before it")
        if any(seq == anchor.seq and link != anchor.link for anchor in self._anchors):
            self._add_problem("rolled_back", entry.key, "it is not the link that the anchor names")
        self._sealed = Chain(seq, link)
        self._check_row(entry.key, document["row"], document["revision"], document["at_ms"])

    def _check_mark(self) -> None:
        mark = self._mark
        keys_hash = PrunedKeysHash(self._keys, self._store.name, self.pruned_keys, mark.keys.partition(":")[0])
        # Without a mark no key is named, and the digest would be an empty text that equals an absent one.
        if (mark.seq or self.pruned_keys) and (not mark.keys or keys_hash.digest() != mark.keys):
            self._add_problem("altered", "mark", "the records of pruned keys are not those that it was made with")
        for anchor in self._anchors:
            if anchor.pruned > mark.seq:
                self._add_problem(
                    "rolled_back", "mark", f"{mark.seq} rows were pruned, and {anchor.pruned} by the anchor"
                )
            if anchor.seq == mark.seq and anchor.link != mark.link:
                self._add_problem("rolled_back", "mark", "it is not the link that the anchor names")

    def _check_end_of_chain(self) -> None:
        if self._sealed != self._chain:
            self._add_problem(
                "missing",
                "chain",
                f"the chain ends with {self._sealed.seq}, and {self._chain.seq} rows were sealed",
            )
        for anchor in self._anchors:
            if self._sealed.seq < anchor.seq:
                self._add_problem("rolled_back", "chain", f"it ends before the anchor, which is at {anchor.seq}")

    def _check_fresh(self) -> None:
        for entry in sorted(self._fresh, key=lambda one: one.key):
            try:
                document = entry.value
                if entry.key != new_key(document["key"], document["n"]):
                    self._add_problem("moved", entry.key, "it is stored under the key of another row")
                self._check_row(entry.key, document, entry.created_revision, entry.created_ms)
            except (Corrupt, InvalidValue, msgspec.ValidationError, KeyError, TypeError, AttributeError, ValueError):
                self._add_problem("altered", entry.key, "it does not have the form in which it was written")

    def _check_row(self, place: str, document: dict[str, Any], revision: int, at_ms: int) -> None:
        unsigned = self._check_signature(place, "row", document)
        if unsigned is None:
            return
        row = msgspec.convert(unsigned, Row)
        last = self._last.setdefault(row.key, _LastRow())
        if row.n != last.n + 1:
            kind: ProblemKind = "missing" if row.n > last.n + 1 else "moved"
            self._add_problem(kind, place, f"it is row {row.n} of {row.key!r}, and follows row {last.n}")
        elif row.previous != last.mac:
            self._add_problem("altered", place, f"it follows another row {last.n} of {row.key!r}")
        elif row.before != last.after:
            self._add_problem("unaudited", place, f"{row.key!r} was changed by other means before row {row.n}")
        self._last[row.key] = _LastRow(row.n, document["mac"], row.after, revision, at_ms)

    def _check_head(self, key: str, entry: Entry, head: Head) -> None:
        last = self._last.get(key, _LastRow())
        if last.n < head.n:
            self._add_problem("missing", head_key(key), f"{key!r} has {head.n} rows by count, and {last.n} are there")
        elif last.n > head.n:
            if last.revision <= self._horizon:
                self._add_problem("altered", head_key(key), f"{key!r} has more rows than the {head.n} by count")
        elif (head.row, head.after) != (last.mac, last.after):
            self._add_problem("altered", head_key(key), f"the last row of {key!r} is another")

    # The data -----------------------------------------------------------------

    async def _compare_data(self) -> None:
        present: set[str] = set()
        async for entry in self._store.scan("tenant/"):
            present.add(entry.key)
            if entry.revision > self._horizon:
                continue
            found = self._heads.get(entry.key)
            if found is None:
                self._add_problem("unaudited", entry.key, "it is present, and the trail has no row of it")
            elif found[0].revision <= self._horizon and (difference := self._compare(entry, found[1])) is not None:
                self._add_problem("unaudited", entry.key, difference)
        for key, (entry, head) in self._heads.items():
            if head.after is not None and key not in present and entry.revision <= self._horizon:
                await self._check_absent(key, entry, head)

    def _compare(self, entry: Entry, head: Head) -> str | None:
        """How an entry differs from its last row; None when it does not."""
        if head.after is None or entry.stored is None:
            return "it is present, and its last row records its end"
        if self._keys.of_value(self._store.name, entry.key, entry.stored, like=head.after) != head.after:
            return "its value differs from its last row"
        meta = entry.meta
        # Re-encryption is a write: in an encrypted store the version may be higher than that of the last row.
        is_version = entry.version == head.version or (self._store.traits.encrypted and entry.version > head.version)
        if (meta.get("lastWriter"), meta.get("semantics")) != (head.writer, head.semantics) or not is_version:
            return "its version, writer or semantics differ from its last row"
        return None

    async def _check_absent(self, key: str, entry: Entry, head: Head) -> None:
        """Check a key without an entry, whose last row left one: it may have expired or changed meanwhile."""
        last = self._last.get(key, _LastRow())
        # The head may have been encrypted again since, which gives it a later time than its last row has.
        if head.ttl_ms is not None and min(last.at_ms, entry.updated_ms) + head.ttl_ms <= self.now_ms + 1000:
            self._pending += 1
            return
        (again,) = await read_family(self._store, [head_key(key)], "audit")
        if again is not None and again.revision == entry.revision and await self._store.entry(key) is None:
            self._add_problem("unaudited", key, "it is absent, and no row records its end")
