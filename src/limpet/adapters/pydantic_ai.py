"""A store for the conversations of Pydantic AI, on any engine.

`ConversationStore` is the library's store with its five primitives. A record and the messages that a save adds are one
batch, guarded by the record's revision: of two writers of a conversation one gets `ConversationConflict`, and leaves
nothing behind.

A fork shares the messages of the conversation it comes from. All that may share messages are one *family*: each record
has its name, and a folder lists the members. So a deletion finds out by the members of the family alone which messages
no conversation needs any more, and deletes them. A fork that begins at the same moment moves the revision of the
message that it begins at, and the deletion looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from pydantic import TypeAdapter
from pydantic_ai import conversation_store
from pydantic_ai.conversation_store import ConversationConflict, ConversationEntry, ConversationRecord
from pydantic_ai.messages import ModelMessagesTypeAdapter

from limpet.adapters.lazy import LazyStore
from limpet.adapters.names import check_prefix, escape, shorten
from limpet.draft import Draft, field
from limpet.errors import Conflict
from limpet.keys import BATCH_BYTES_MAX, BATCH_WRITES_MAX, KEYS_MAX
from limpet.model import ABSENT, PRESENT, Entry, Revision
from limpet.store import Store

__all__ = ["ConversationStore"]

PREFIX: Final = "conversations/"
NAME_BYTES_MAX: Final = 300

ANCESTORS_MAX: Final = 20
"""How many messages before it a message knows, so that a history is read in so many fewer round trips."""

# Beside messages, a batch has the record, its place in the family, and the message that it goes on from.
MESSAGES_MAX: Final = BATCH_WRITES_MAX - 3
MESSAGES_BYTES_MAX: Final = BATCH_BYTES_MAX - 1_100_000

_records: Final = TypeAdapter(ConversationRecord)


class ConversationStore(conversation_store.ConversationStore):
    """A store for conversations.

    `delete` deletes the messages too, but for those that a fork still has. If the process ends in the middle of it, the
    conversation is gone, and messages of it may stay where no conversation reaches them.

    Args:
        store: A URL, or a store from `limpet.open`; ``LIMPET_URL`` or ``./limpet.db`` when not given. A URL is opened
            by the first call, on its event loop. A store that was given is not closed.
        namespace: The namespace that a URL is opened with.
        prefix: What all keys start with.
    """

    def __init__(self, store: Store | str | None = None, *, namespace: str = "default", prefix: str = PREFIX) -> None:
        self._lazy = LazyStore(store, namespace)
        self._prefix = check_prefix(prefix)

    async def close(self) -> None:
        """Close what was opened on this event loop."""
        await self._lazy.close()

    async def __aenter__(self) -> Self:
        await self._lazy.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # Reading ------------------------------------------------------------------

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        """The record of a conversation; None when there is none."""
        found = await (await self._lazy.open()).entry(self._record_key(conversation_id))
        return None if found is None else _load_record(found)

    async def read_records(self, *, scope: str | None = None, limit: int | None = None) -> Sequence[ConversationRecord]:
        """The records, of one scope if it is given, those saved last first."""
        store, where = await self._lazy.open(), None if scope is None else field("scope") == scope
        records = [_load_record(found) async for found in store.scan(f"{self._prefix}record/", where=where)]
        return sorted(records, key=lambda record: record.updated_at, reverse=True)[:limit]

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        """A message by the identifier of its entry."""
        return (await self.read_history(entry_id, limit=1))[0]

    async def read_history(self, head_id: str | None, *, limit: int | None = None) -> list[ConversationEntry]:
        """The messages from the first one up to this one, or only the last of them."""
        line = await self._read_line(await self._lazy.open(), head_id, limit)
        return [_load_entry(found) for found in reversed(line)]

    async def _read_line(self, store: Store, head_id: str | None, limit: int | None = None) -> list[Entry]:
        """A message and those before it, the newest first."""
        line = list[Entry]()
        wanted = [] if head_id is None else [head_id]
        while wanted and (limit is None or len(line) < limit):
            rest = None if limit is None else limit - len(line)
            for entry_id, found in zip(
                wanted, await store.entries([self._message_key(each) for each in wanted[:rest]]), strict=False
            ):
                if found is None:
                    raise LookupError(f"message {entry_id} is not in the store: its conversation was deleted")
                line.append(found)
            wanted = line[-1].value["ancestors"]
        return line

    # Writing ------------------------------------------------------------------

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """Store a record and new messages in one step, unless others have changed it."""
        store, key = await self._lazy.open(), self._record_key(record.conversation_id)
        found = await store.entry(key)
        if (None if found is None else found.value["record"]["revision"]) != expected_revision:
            raise ConversationConflict(record.conversation_id)
        head = await self._find_known_head(store, record, new_entries)
        family = head.value["family"] if head is not None and found is None else record.conversation_id
        family = family if found is None else found.value["family"]
        early = list[str]()
        try:
            *before, last = _slices(await self._dump_entries(store, new_entries, family)) or [{}]
            # All are checked before the first is stored.
            parts = [(list(messages), self._draft(store, messages)) for messages in before]
            draft = self._draft(store, last).expect(key, ABSENT if found is None else found)
            draft.put(key, {"record": _dump(_records, record), "scope": record.scope, "family": family})
            draft.put(self._member_key(family, record.conversation_id), record.conversation_id)
            if head is not None:
                # It may be that of another conversation, which is being deleted: see `_delete_messages`.
                draft.expect(head.key, PRESENT).touch(head.key, None)
            for keys, part in parts:
                # More than a batch holds. No record leads to them yet.
                early += keys
                await part.commit()
            await draft.commit()
        except Conflict:
            for each in early:
                await store.delete(each)
            raise ConversationConflict(record.conversation_id) from None

    async def _find_known_head(
        self, store: Store, record: ConversationRecord, new_entries: Sequence[ConversationEntry]
    ) -> Entry | None:
        """The message that the record ends with, if it was stored before."""
        if record.head_id is None or record.head_id in {entry.id for entry in new_entries}:
            return None
        head = await store.entry(self._message_key(record.head_id))
        if head is None:
            raise ConversationConflict(record.conversation_id)
        return head

    async def _dump_entries(
        self, store: Store, entries: Sequence[ConversationEntry], family: str
    ) -> dict[str, dict[str, Any]]:
        """What is stored of messages, by key. Each knows those before it."""
        dumped, ancestors = dict[str, dict[str, Any]](), dict[str, list[str]]()
        for entry in entries:
            parent_id = entry.parent_id
            if parent_id is not None and parent_id not in ancestors:
                parent = await store.entry(self._message_key(parent_id))
                ancestors[parent_id] = [] if parent is None else parent.value["ancestors"]
            before = [] if parent_id is None else [parent_id, *ancestors[parent_id]][:ANCESTORS_MAX]
            ancestors[entry.id] = before
            [message] = _dump(ModelMessagesTypeAdapter, [entry.message])
            dumped[self._message_key(entry.id)] = {
                "id": entry.id,
                "kind": entry.kind,
                "message": message,
                "ancestors": before,
                "family": family,
            }
        return dumped

    def _draft(self, store: Store, messages: dict[str, dict[str, Any]]) -> Draft:
        draft = store.batch()
        for key, message in messages.items():
            draft.put(key, message)
        return draft

    # Deleting -----------------------------------------------------------------

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        """Delete a record, and the messages that no other conversation has."""
        store, key = await self._lazy.open(), self._record_key(conversation_id)
        found = await store.entry(key)
        if found is None or found.value["record"]["revision"] != expected_revision:
            raise ConversationConflict(conversation_id)
        family = found.value["family"]
        draft = store.batch().expect(key, found).delete(key)
        try:
            await draft.delete(self._member_key(family, conversation_id)).commit()
        except Conflict:
            raise ConversationConflict(conversation_id) from None
        own = await self._read_lines(store, _load_record(found))
        while not await self._delete_messages(store, list(own), family):
            pass

    async def _delete_messages(self, store: Store, keys: list[str], family: str) -> bool:
        """Delete messages that no record has. False if a fork may have begun at one meanwhile."""
        doomed = list[Entry]()
        for at in range(0, len(keys), KEYS_MAX):
            doomed += filter(None, await store.entries(keys[at : at + KEYS_MAX]))
        # Their revisions are known now, so that a fork is either among these members or a conflict below.
        members = [entry.value async for entry in store.scan(f"{self._prefix}family/{_escape(family)}/")]
        needed = set[str]()
        for record in [await self.read_record(member) for member in members]:
            needed |= set() if record is None else set(await self._read_lines(store, record))
        # The newest go first, so that what is left has all that was before it.
        doomed = [entry for entry in doomed if entry.key not in needed]
        doomed.sort(key=lambda entry: entry.created_revision, reverse=True)
        for at in range(0, len(doomed), BATCH_WRITES_MAX):
            draft = store.batch()
            for entry in doomed[at : at + BATCH_WRITES_MAX]:
                draft.expect(entry.key, Revision(entry.revision)).delete(entry.key)
            try:
                await draft.commit()
            except Conflict:
                return False
        return True

    async def _read_lines(self, store: Store, record: ConversationRecord) -> dict[str, Entry]:
        """The messages of a record and of the branches it has left, by key."""
        lines = dict[str, Entry]()
        for tip in [record.head_id, *record.branches]:
            if tip is not None and self._message_key(tip) not in lines:
                try:
                    lines |= {entry.key: entry for entry in await self._read_line(store, tip)}
                except LookupError:
                    # Another deletes it, too, and has come this far.
                    continue
        return lines

    # Keys ---------------------------------------------------------------------

    def _record_key(self, conversation_id: str) -> str:
        return f"{self._prefix}record/{_escape(conversation_id)}"

    def _message_key(self, entry_id: str) -> str:
        return f"{self._prefix}message/{_escape(entry_id)}"

    def _member_key(self, family: str, conversation_id: str) -> str:
        return f"{self._prefix}family/{_escape(family)}/{_escape(conversation_id)}"


def _escape(name: str) -> str:
    return shorten(escape(name), NAME_BYTES_MAX)


def _dump(adapter: TypeAdapter[Any], value: object) -> Any:
    """A value of the library as JSON, so that every tool of Limpet shows it."""
    return msgspec.json.decode(adapter.dump_json(value))


def _load_record(found: Entry) -> ConversationRecord:
    return _records.validate_json(msgspec.json.encode(found.value["record"]))


def _load_entry(found: Entry) -> ConversationEntry:
    stored = found.value
    [message] = ModelMessagesTypeAdapter.validate_json(msgspec.json.encode([stored["message"]]))
    parent_id = stored["ancestors"][0] if stored["ancestors"] else None
    return ConversationEntry(id=stored["id"], parent_id=parent_id, message=message, kind=stored["kind"])


def _slices(messages: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Messages in parts that a batch holds: nearly always one."""
    parts, part_bytes = list[dict[str, dict[str, Any]]](), 0
    for key, message in messages.items():
        size_bytes = len(msgspec.json.encode(message))
        if not parts or len(parts[-1]) == MESSAGES_MAX or part_bytes + size_bytes > MESSAGES_BYTES_MAX:
            parts.append({})
            part_bytes = 0
        parts[-1][key] = message
        part_bytes += size_bytes
    return parts
