"""Sealing the audit trail: new rows become links of one chain, in the order of their revisions.

One sealer at a time does this, under a fenced lock. A sealed row cannot be changed, removed or moved without a
verification finding it, with one exception: an attacker who can write the database and has an older copy of it can put
back the older end of the chain, with the heads of some keys, and leave out the rows after it. Nothing inside the
database shows that.

An anchor does. It is the end of the chain at some moment, kept outside of the database. A sealer remembers the latest
anchor for as long as it runs, refuses to seal a chain that no longer goes through it, and logs it, so that it can be
passed to a verification after a restart.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import ClassVar, Final, ParamSpec, TypeVar

import msgspec

from limpet.codec import encode_field
from limpet.errors import Closed, Conflict, Corrupt, LockExpired, LockHeld, LockLost
from limpet.lock import Lock
from limpet.model import ABSENT, Condition, Delete, Guard, Put, Revision
from limpet.retry import Outage
from limpet.semantic.audit import Audit, Keys, Trail, read_head, sign
from limpet.semantic.background import BackgroundTask
from limpet.semantic.chain import (
    LOCK,
    LOCK_TTL_S,
    ROWS_MAX,
    Anchor,
    Chain,
    PruneMark,
    parse_anchor,
    read_signed,
    sealed_key,
)
from limpet.semantic.copies import expired_keys, live_key, read_copies
from limpet.semantic.families import read_family, scan_family
from limpet.store import Store

__all__ = ["Sealer", "record_expiries", "seal"]

log = logging.getLogger("limpet.semantic")

SEAL_S: Final = 2.0
"""How often the sealer runs. With that, a row is sealed within five seconds."""
ANCHOR_S: Final = 60.0
"""How often the sealer logs the end of a chain that grows."""
STEPS_MAX: Final = 8

P = ParamSpec("P")
R = TypeVar("R")


async def seal(store: Store, audit: Audit) -> int:
    """Seal the rows that are new. Returns how many this call sealed: zero while another call holds the lock."""
    lock = store.lock(LOCK, ttl=LOCK_TTL_S, cancel=False)
    try:
        async with lock:
            return await _seal_under(store, audit.keys, lock)
    except (LockHeld, LockLost, LockExpired):
        return 0


async def _seal_under(store: Store, keys: Keys, lock: Lock) -> int:
    # The scan finds every row up to this revision. It may find a later row and miss an earlier one, so later rows wait
    # for the next round.
    horizon = (await store.status()).revision
    # In the order of the revisions that created them: re-encryption gives a row another revision.
    fresh = [(entry.created_revision, entry.key) async for entry in scan_family(store, "new/", "audit", values=False)]
    due = [key for revision, key in sorted(fresh) if revision <= horizon]
    for first in range(0, len(due), ROWS_MAX):
        await _retry_conflicts(_seal_some, store, keys, lock, due[first : first + ROWS_MAX])
    return len(due)


async def _retry_conflicts(step: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a step of the holder of the lock. Only re-encryption can conflict with it, and only for a moment."""
    for _ in range(STEPS_MAX):
        with contextlib.suppress(Conflict):
            return await step(*args, **kwargs)
    return await step(*args, **kwargs)


async def _seal_some(store: Store, keys: Keys, lock: Lock, due: list[str]) -> None:
    (chain_entry,) = await read_family(store, ["chain"], "audit")
    chain = Chain() if chain_entry is None else msgspec.convert(chain_entry.value, Chain)
    seq, link = chain.seq, chain.link
    draft = store.batch().fence(lock)
    for entry in await read_family(store, due, "audit"):
        if entry is None:
            # The row was removed. A verification will find that its key has one row fewer than its head counts.
            continue
        seq += 1
        document = {"seq": seq, "row": entry.value, "revision": entry.created_revision, "at_ms": entry.created_ms}
        link = keys.digest("link", encode_field([store.name, link, document]))
        draft.include(
            Delete(entry.key, family="audit"),
            Put(sealed_key(seq), encode_field({**document, "link": link}), family="audit"),
            guards=[Guard(entry.key, Revision(entry.revision), "audit")],
        )
    text = sign(keys, store.name, "chain", {"seq": seq, "link": link})
    condition: Condition = ABSENT if chain_entry is None else Revision(chain_entry.revision)
    draft.include(Put("chain", text, family="audit"), guards=[Guard("chain", condition, "audit")])
    await draft.commit()


async def record_expiries(store: Store, audit: Audit) -> int:
    """Write a row for each entry that expired and has none of that yet. Returns how many rows this call wrote."""
    trail = Trail(store, audit)
    expired = [key async for key in expired_keys(store, audit.grace_ms)]
    written = 0
    for first in range(0, len(expired), ROWS_MAX):
        page = expired[first : first + ROWS_MAX]
        copies = await read_copies(store, [live_key(key) for key in page])
        heads = await trail.heads(page)
        for key, live, head in zip(page, copies, heads, strict=True):
            if live is None or head is None:
                continue
            if live.meta.get("n") == read_head(head).n:
                written += await trail.record_expiry(key, head)
                continue
            # The key was written again since, without a time to live.
            with contextlib.suppress(Conflict):
                guard = Guard(live.key, Revision(live.revision), "recoverable")
                await store.batch().include(Delete(live.key, family="recoverable"), guards=[guard]).commit()
    return written


class Sealer(BackgroundTask):
    """Seals the trail of a namespace in the background, and records expiries.

    It remembers the end of the chain as it last saw it. Once the chain no longer goes through that, an older state was
    put back, and the sealer seals nothing any more.

    Args:
        store: The namespace.
        audit: With the keys that sign.
        anchor: The latest anchor that an earlier sealer or verification gave.
    """

    task_name: ClassVar[str] = "limpet-sealer"

    def __init__(self, store: Store, audit: Audit, *, anchor: str | None = None) -> None:
        super().__init__()
        self._store = store
        self._audit = audit
        self._seen = parse_anchor(anchor)
        self._logged: Anchor | None = None
        self._logged_at = -ANCHOR_S

    async def turn(self) -> int:
        """Record expiries and seal the rows that are new, now. Returns how many rows were sealed.

        Raises:
            Corrupt: The chain does not go through what this sealer saw earlier. Nothing was sealed.
        """
        await self._check_chain()
        await record_expiries(self._store, self._audit)
        # Take the lock only when there is something to seal: it would fill the log of an idle namespace.
        async for _ in scan_family(self._store, "new/", "audit", values=False):
            sealed = await seal(self._store, self._audit)
            await self._check_chain()
            return sealed
        return 0

    @property
    def anchor(self) -> str | None:
        """The end of the chain as it was last seen; None before there was any."""
        return None if self._seen is None else str(self._seen)

    def remember(self, anchor: str) -> None:
        """Accept the anchor of a verification that found nothing wrong."""
        known = parse_anchor(anchor)
        if known is not None and (self._seen is None or known.seq >= self._seen.seq):
            self._seen = known

    async def _check_chain(self) -> None:
        """Compare the chain with what was seen of it, and remember its end."""
        seen, name, keys = self._seen, self._store.name, self._audit.keys
        places = ["chain", "mark", sealed_key(seen.seq if seen is not None else 0)]
        chain_entry, mark_entry, link_entry = await read_family(self._store, places, "audit")
        chain = read_signed(keys, name, "chain", chain_entry, Chain) or Chain()
        mark = read_signed(keys, name, "mark", mark_entry, PruneMark) or PruneMark()
        if seen is not None and (problem := seen.find_rollback(chain, mark, link_entry)) is not None:
            log.error(
                "the audit trail of namespace %s went back: %s. It was at %s. Nothing is sealed any more",
                name,
                problem,
                seen,
                extra={"event": "auditRolledBack", "namespace": name, "anchor": str(seen)},
            )
            raise Corrupt(
                f"the audit trail of namespace {name!r} went back: {problem}. Verify it with anchor {seen}; if an "
                "older state was put back on purpose, restart the process that seals it"
            )
        if chain.seq:
            self._seen = Anchor(chain.seq, mark.seq, chain.link)
            self._log_anchor()

    def _log_anchor(self) -> None:
        """Log the end of the chain: once a minute while it grows, and after each turn that is run by hand."""
        now = self._store._session.clock.monotonic()
        if self._seen == self._logged or (self.is_started and now - self._logged_at < ANCHOR_S):
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
