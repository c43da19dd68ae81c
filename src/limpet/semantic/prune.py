"""Pruning the audit trail: removing its oldest links so that what is left can still be verified.

Each commit removes some links, and writes in the same commit what a verification needs to go on from there, signed: the
last link that was removed, and the last row of each key that had one. So the trail is sound after each step, and after
a crash the next call continues.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec

from limpet.errors import Corrupt, InvalidValue
from limpet.lock import Lock
from limpet.model import Delete, Entry, Put, Write
from limpet.semantic.audit import Audit, Keys, sign
from limpet.semantic.chain import LOCK, LOCK_TTL_S, ROWS_MAX, PrunedKey, PrunedKeysHash, PruneMark
from limpet.semantic.families import scan_family
from limpet.semantic.verify import Verification
from limpet.store import Store

__all__ = ["Pruned", "prune"]


class Pruned(msgspec.Struct, frozen=True):
    """What pruning removed, or would remove.

    Attributes:
        rows: How many rows.
        to_ms: When the last of them was written; None when there was none.
        unaudited: How many of them recorded a change by other means before them. No other row records those changes.
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
    """Remove the sealed rows that are older than a moment, and leave a signed mark of where they ended.

    The trail is verified before, because that is impossible afterwards. Each step is one commit, and leaves a trail
    that is sound. Writers go on meanwhile; sealing waits.

    Args:
        store: The namespace.
        audit: With the keys that signed it.
        before: The moment, or how long ago it was.
        anchor: The anchor of an earlier report, as of `limpet.semantic.verify.verify`.
        dry_run: Only count what would be removed.
        progress: Called after each step with the number of rows removed so far.
        wait_s: How long to wait for a sealer, or for another call that prunes.

    Raises:
        Corrupt: The trail is not sound. Nothing was removed.
        LockHeld: The sealer or another call worked on the trail all the time.
    """
    _check_moment(before)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a function of a number, not something of type {type(progress).__name__}")
    verification = Verification(store, audit, anchor)
    async with store.lock(LOCK, ttl=LOCK_TTL_S, wait=wait_s) as lock:
        report = await verification.run(with_data=False)
        if (wrong := verification.altered) is not None:
            raise Corrupt(f"nothing was pruned: the trail is not sound. {wrong.place!r}: {wrong.text}")
        keys_hash = PrunedKeysHash(audit.keys, store.name, verification.pruned_keys, audit.keys.key_id)
        before_ms = _moment_ms(before, verification.now_ms)
        rows, last, due = 0, "", list[Entry]()
        to_ms: int | None = None
        async for entry in scan_family(store, "sealed/", "audit"):
            if entry.value["at_ms"] >= before_ms:
                break
            rows, last, to_ms = rows + 1, entry.key, entry.value["at_ms"]
            if dry_run:
                continue
            due.append(entry)
            if len(due) == ROWS_MAX:
                await _remove_links(store, audit.keys, lock, due, keys_hash)
                due = []
                if progress is not None:
                    progress(rows)
        if due:
            await _remove_links(store, audit.keys, lock, due, keys_hash)
        unaudited = [one for one in report.problems if one.place.startswith("sealed/") and one.place <= last]
        return Pruned(rows, to_ms, len(unaudited))


async def _remove_links(store: Store, keys: Keys, lock: Lock, due: list[Entry], keys_hash: PrunedKeysHash) -> None:
    """Remove the first links of the chain, in one commit."""
    pruned = {
        one.value["row"]["key"]: PrunedKey(
            one.value["row"]["n"], one.value["row"]["mac"], one.value["row"]["after"], one.value["at_ms"]
        )
        for one in due
    }
    keys_hash.replace(pruned)
    end = due[-1].value
    mark = PruneMark(end["seq"], end["link"], end["at_ms"], keys_hash.digest())
    writes: list[Write] = [
        *(Delete(one.key, family="audit") for one in due),
        *(
            Put(f"past/{key}", sign(keys, store.name, f"past {key}", msgspec.to_builtins(one)), family="audit")
            for key, one in pruned.items()
        ),
        Put("mark", sign(keys, store.name, "mark", msgspec.to_builtins(mark)), family="audit"),
    ]
    await store.batch().fence(lock).include(*writes).commit()


def _check_moment(before: object) -> None:
    if not isinstance(before, datetime | timedelta):
        raise InvalidValue(
            f"the moment to prune up to is a datetime or a timedelta, not of type {type(before).__name__}"
        )
    if isinstance(before, datetime) and before.tzinfo is None:
        raise InvalidValue("the moment to prune up to needs a time zone")


def _moment_ms(before: datetime | timedelta, now_ms: int) -> int:
    if isinstance(before, timedelta):
        return now_ms - round(before.total_seconds() * 1000)
    return round(before.timestamp() * 1000)
