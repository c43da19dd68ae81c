"""The audit trail: who changed what, when and for what purpose, without any value.

Every change of an audited namespace writes a row, in the same commit as the change. A row has keyed hashes of the value
before and after: a reader of the trail can see whether two values are equal, and cannot guess either. A row is signed,
has the next number of its key, and names the signature of the row before.

The trail is kept in the family ``audit`` of its namespace:

    head/<key>              how many rows the key has, the signature of the last, and what that left
    new/<key>/<n>           a row that is not sealed yet
    sealed/<n>              a row in the chain of all rows, in the order in which they happened
    chain                   how long the chain is, and its last link
    mark                    up to where the chain was pruned, and the link there
    past/<key>              how many rows of the key were pruned, and the last of them in short

`limpet.semantic.seal` makes the chain, `limpet.semantic.verify` verifies it, and `limpet.semantic.prune` shortens it.
An entry with a time to live has a copy in the family ``recoverable``, so that it can be recovered for a while after it
expired; that is the only value kept here. `limpet.semantic.copies` describes the copies.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from limpet.codec import Stored, encode_field
from limpet.errors import Conflict, Corrupt, InvalidValue
from limpet.model import ABSENT, Delete, Entry, Guard, Put, Revision, Write
from limpet.semantic.copies import GRACE_S, expired_key, live_copy, live_key, log_expiry, move_copy, read_copies
from limpet.semantic.families import read_family
from limpet.semantic.model import Semantics, directive_of
from limpet.store import Store

__all__ = ["Audit", "Head", "Keys", "Row", "Trail", "head_key", "new_key", "read_head", "sign"]

log = logging.getLogger("limpet.semantic")

SECRET_BYTES_MIN: Final = 32

Op = Literal["put", "delete", "expire", "recover"]


class Audit:
    """The keys of an audit trail, and how long an expired entry can be recovered.

    Args:
        secret: The key, 32 bytes or more. With it, values can be guessed and rows forged.
        key_id: Its name, which stands beside every hash.
        older: Keys that were used before, by their names: what they signed stays valid.
        grace_s: How long an entry that expired can be recovered.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        key_id: str = "1",
        older: Mapping[str, bytes] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.keys = Keys(secret, key_id, older or {})
        if not grace_s > 0:
            raise InvalidValue("the time to recover must be more than zero seconds")
        self.grace_ms = round(grace_s * 1000)

    @classmethod
    def from_environment(cls, *, grace_s: float = GRACE_S) -> Audit | None:
        """The audit that the environment sets up; None where no key is set.

        ``LIMPET_AUDIT_KEYS``, or the file that ``LIMPET_AUDIT_KEYS_FILE`` names, holds pairs ``name:hex``, separated by
        commas or lines. The first key is used from now on; the others have been used before.
        """
        text = os.environ.get("LIMPET_AUDIT_KEYS", "")
        if not text and (file := os.environ.get("LIMPET_AUDIT_KEYS_FILE")):
            try:
                text = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise InvalidValue(f"cannot read {file!r}, which LIMPET_AUDIT_KEYS_FILE names: {problem}") from None
        pairs = [pair.strip().partition(":") for pair in text.replace("\n", ",").split(",") if pair.strip()]
        if not pairs:
            return None
        try:
            secrets = {name: bytes.fromhex(secret) for name, _, secret in pairs}
        except ValueError:
            raise InvalidValue("LIMPET_AUDIT_KEYS must hold pairs of a name, a colon and hexadecimal digits") from None
        (key_id, secret), *older = secrets.items()
        return cls(secret, key_id=key_id, older=dict(older), grace_s=grace_s)

    def __repr__(self) -> str:
        return f"Audit(key_id={self.keys.key_id!r})"


class Keys:
    """The keys of the hashes. A hash is the name of its key, a colon, and HMAC-SHA256 in hexadecimal digits."""

    def __init__(self, secret: bytes, key_id: str, older: Mapping[str, bytes]) -> None:
        self.key_id = key_id
        self._secrets = {**older, key_id: secret}
        for name, one in self._secrets.items():
            if len(one) < SECRET_BYTES_MIN:
                raise InvalidValue(f"the audit key {name!r} has {len(one)} bytes; it needs {SECRET_BYTES_MIN} or more")
            if not name or ":" in name or "," in name:
                raise InvalidValue("the name of an audit key must not be empty, and must hold no colon and no comma")

    def digest(self, what: str, content: bytes, key_id: str | None = None) -> str:
        """A keyed hash of bytes for one purpose, ``what``. It is empty when the key is not known."""
        name = self.key_id if key_id is None else key_id
        secret = self._secrets.get(name)
        if secret is None:
            return ""
        mac = hmac.new(secret, what.encode() + b"\0" + content, hashlib.sha256)
        return f"{name}:{mac.hexdigest()}"

    def matches(self, what: str, content: bytes, digest: object) -> bool:
        """Whether a hash is that of these bytes, by the key that the hash names."""
        if not isinstance(digest, str) or not digest:
            return False
        made = self.digest(what, content, digest.partition(":")[0])
        return hmac.compare_digest(made.encode(), digest.encode(errors="replace"))

    def of_value(self, namespace: str, key: str, stored: Stored, like: str | None = None) -> str:
        """The hash of a value under its key; with ``like``, by the secret that made that hash."""
        body = b"\0" + stored if isinstance(stored, bytes) else encode_field({n: f.hex() for n, f in stored.items()})
        content = encode_field([namespace, key]) + body
        return self.digest("value", content, None if like is None else like.partition(":")[0])

    def __repr__(self) -> str:
        return f"Keys({', '.join(sorted(self._secrets))})"


class Row(msgspec.Struct, frozen=True, rename="camel"):
    """A row of the trail.

    Attributes:
        key: The key that changed.
        n: Which change of this key it is, from 1 on.
        op: ``put``, ``delete``, ``expire`` or ``recover``.
        writer: Who changed it: ``<agent>:<directive>``, or a service account.
        directive: The directive alone.
        purpose: What the entry is for.
        semantics: The semantics of the entry.
        request_id: The request; None for an expiry.
        version: The version after the change; of an end, the last one.
        before: The keyed hash of the value before; None where there was none.
        after: The keyed hash of the value after; None after an end.
        previous: The signature of the key's row before.
        spec_ref: The specification that governs it.
    """

    key: str
    n: int
    op: Op
    writer: str
    directive: str
    purpose: str
    semantics: dict[str, Any]
    request_id: str | None
    version: int
    before: str | None
    after: str | None
    previous: str | None
    spec_ref: str | None = None


class Head(msgspec.Struct, frozen=True, rename="camel"):
    """The last row of a key in short, with what a row of its expiry would need."""

    n: int
    row: str
    op: Op
    writer: str
    semantics: dict[str, Any]
    version: int
    before: str | None
    after: str | None
    ttl_ms: int | None = None
    spec_ref: str | None = None


class PlannedRow(msgspec.Struct, frozen=True):
    """The row of a change, with the writes for it and the guards that keep the trail whole."""

    row: Row
    guards: tuple[Guard, ...]
    writes: tuple[Write, ...]


def head_key(key: str) -> str:
    """Where the head of a key is."""
    return f"head/{key}"


def new_key(key: str, n: int) -> str:
    """Where a row of a key is until it is sealed."""
    return f"new/{key}/{n:010}"


def sign(keys: Keys, namespace: str, what: str, document: dict[str, Any]) -> bytes:
    """A document with its signature, as it is stored."""
    mac = keys.digest(what, encode_field([namespace, document]))
    return encode_field({**document, "mac": mac})


class Trail:
    """The audit trail of a namespace, as writers see it."""

    def __init__(self, store: Store, audit: Audit) -> None:
        self.audit = audit
        self._store = store
        self._keys = audit.keys

    def hash_of(self, key: str, stored: Stored) -> str:
        """The keyed hash of a value."""
        return self._keys.of_value(self._store.name, key, stored)

    async def heads(self, keys: Sequence[str]) -> list[Entry | None]:
        """The heads of some keys."""
        return await read_family(self._store, [head_key(key) for key in keys], "audit")

    def is_pending(self, entry: Entry | None, head: Entry | None) -> bool:
        """Whether a key expired and has no row of that yet."""
        return entry is None and head is not None and read_head(head).ttl_ms is not None

    def plan(
        self,
        op: Op,
        key: str,
        *,
        found: Entry | None,
        head_entry: Entry | None,
        stored: Stored | None,
        version: int,
        writer: str,
        semantics: Semantics | dict[str, Any],
        request_id: str | None,
        spec_ref: str | None,
    ) -> PlannedRow:
        """The row of a change, with its writes and guards.

        ``found`` is the entry before, ``stored`` the value after; without it, the change ends the entry.
        """
        name, keys = self._store.name, self._keys
        head = None if head_entry is None else read_head(head_entry)
        document = semantics.to_dict() if isinstance(semantics, Semantics) else semantics
        before = None
        if found is not None and found.stored is not None:
            # With the secret of the last row, so that a new secret since then makes no difference. A value that was
            # written by other means does not match that row, and is hashed with the current secret.
            known = None if head is None or head.after is None else head.after
            before = keys.of_value(name, key, found.stored, like=known)
            before = before if before == known else keys.of_value(name, key, found.stored)
        elif op == "expire" and head is not None:
            before = head.after
        row = Row(
            key,
            1 if head is None else head.n + 1,
            op,
            writer,
            directive_of(writer),
            str(document.get("purpose", "")),
            document,
            request_id,
            version,
            before,
            None if stored is None else keys.of_value(name, key, stored),
            None if head is None else head.row,
            spec_ref,
        )
        ttl_ms = None
        if stored is not None and document.get("ttlSeconds") is not None:
            ttl_ms = msgspec.convert(document, Semantics).ttl_ms
        text = sign(keys, name, "row", msgspec.to_builtins(row))
        new_head = Head(row.n, _mac(text), op, writer, document, version, row.before, row.after, ttl_ms, spec_ref)
        writes: list[Write] = [
            Put(new_key(key, row.n), text, family="audit"),
            Put(head_key(key), sign(keys, name, f"head {key}", msgspec.to_builtins(new_head)), family="audit"),
        ]
        if stored is not None and ttl_ms is not None:
            writes.append(self._recoverable_copy(key, stored, ttl_ms, row))
        elif op == "delete":
            writes += [Delete(live_key(key), family="recoverable"), Delete(expired_key(key), family="recoverable")]
        guard = Guard(head_key(key), ABSENT if head_entry is None else Revision(head_entry.revision), "audit")
        return PlannedRow(row, (guard,), tuple(writes))

    def _recoverable_copy(self, key: str, stored: Stored, ttl_ms: int, row: Row) -> Put:
        meta = {"n": row.n, "writer": row.writer, "semantics": row.semantics}
        if row.spec_ref is not None:
            meta["specRef"] = row.spec_ref
        return live_copy(key, stored, ttl_ms, self.audit.grace_ms, meta)

    async def record_expiry(self, key: str, head_entry: Entry) -> bool:
        """Write the row of an entry that expired, once. False when it is there, or has no expiry to record."""
        head = read_head(head_entry)
        if head.ttl_ms is None:
            return False
        (live,) = await read_copies(self._store, [live_key(key)])
        planned = self.plan(
            "expire",
            key,
            found=None,
            head_entry=head_entry,
            stored=None,
            version=head.version,
            writer=head.writer,
            semantics=head.semantics,
            request_id=None,
            spec_ref=head.spec_ref,
        )
        draft = self._store.batch().include(*planned.writes, guards=(*planned.guards, Guard(key, ABSENT)))
        if live is not None and live.expires_ms is not None and live.stored is not None:
            # A copy of an earlier row than the last is not what expired, and is only removed.
            is_last = live.meta.get("n") == head.n
            now_ms = (await self._store.status()).now_ms
            writes = move_copy(key, live, now_ms) if is_last else [Delete(live.key, family="recoverable")]
            draft.include(*writes, guards=[Guard(live.key, Revision(live.revision), "recoverable")])
        try:
            await draft.commit()
        except Conflict:
            # The entry is there again, another process recorded its expiry, or its copy changed. The next read shows.
            return False
        log_expiry(key, {"writer": head.writer, "semantics": head.semantics, "version": head.version})
        return True

    async def recoverable(self, key: str) -> tuple[Entry, Entry] | None:
        """The copy of an entry that expired, and the head of its key; None when it can no longer be recovered."""
        (head_entry,) = await self.heads([key])
        (copy,) = await read_copies(self._store, [expired_key(key)])
        if head_entry is None or copy is None or copy.stored is None:
            return None
        head = read_head(head_entry)
        if head.op != "expire" or copy.meta.get("n") != head.n - 1:
            return None
        if head.before != self._keys.of_value(self._store.name, key, copy.stored, like=head.before):
            # Its value is not the one that expired.
            return None
        return copy, head_entry


def read_head(entry: Entry) -> Head:
    """The head in an entry. Its signature is checked by a verification, not here."""
    try:
        return msgspec.convert(entry.value, Head)
    except msgspec.ValidationError as error:
        raise Corrupt(
            f"{entry.key!r} of the audit trail does not have the form in which it was written: verify the trail"
        ) from error


def _mac(text: bytes) -> str:
    return msgspec.json.decode(text, type=_Signed).mac


class _Signed(msgspec.Struct):
    mac: str
