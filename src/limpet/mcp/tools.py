"""The tools: a table of what an agent can do, with the shape of each call and of its answer.

The descriptions are read by a model before it calls, so they say when to use a tool and what to do with its answer.
Arguments are checked by their types before anything runs; a mistake is an answer that names the member, never the end
of the session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from limpet.codec import INT_MAX
from limpet.errors import InvalidValue, PermissionDenied
from limpet.keys import key_span
from limpet.mcp import values
from limpet.mcp.workspace import EDIT, WAIT, Edit, Wait, Workspace
from limpet.model import Entry
from limpet.server import requests
from limpet.server.operations import OPERATIONS, WAIT_S_MAX
from limpet.server.requests import Expect, Fence, Int64, Strict

__all__ = ["INSTRUCTIONS", "TOOLS", "Found", "Listing", "Tool", "read_entry", "read_page", "schema_of"]

INSTRUCTIONS: Final = """\
This is state that you share with other agents: entries, each a JSON value under a key such as 'plan' or 'task/7'.
Others may write at any time. So read before you write, and pass the revision that you have read: a write that would
undo what others wrote is refused and explained, and nothing is lost.
- To change a part of a document that others change too, use edit: it keeps the members that others changed meanwhile.
- To collect things that many add to (results, messages, log lines), use append: each gets a key of its own.
- Where only one may do a piece of work, take a lock first, and pass its token with what you write.
- To find out what others do, use wait, or subscribe to a resource, instead of reading again and again.
After a conflict, do what its 'Next:' says. Never repeat the same call unchanged."""

PAGE: Final = 50
PAGE_MAX: Final = 200
VALUE_CHARS_MAX: Final = 1_000
"""How long a value may be to be shown in a list."""

Revision = Annotated[int, Meta(ge=0, le=INT_MAX)]
Key = Annotated[str, Meta(description="The key, such as 'plan' or 'task/7'.")]
Read = Annotated[int, Meta(ge=0, le=INT_MAX, description="The revision that get returned. 0 if there was no such key.")]
Value = Annotated[Any, Meta(description="Any JSON value.")]
TTL = Annotated[
    float | None, Meta(description="Seconds until it ends by itself. Leave it out for an entry that stays.")
]
LockName = Annotated[str | None, Meta(description="A lock that you hold: refuse this write if you have lost it.")]
Token = Annotated[Int64 | None, Meta(description="The token that lock returned, given together with lock.")]


# The shapes of calls ----------------------------------------------------------


class Get(Strict, frozen=True, kw_only=True):
    """Arguments of get."""

    key: Key
    path: Annotated[str, Meta(description="Only this member, such as '/steps/0'. Empty for the whole value.")] = ""
    offset: Annotated[
        int, Meta(ge=0, description="To go on with a long value: the next_offset of the answer before.")
    ] = 0


class Fenced(Strict, frozen=True, kw_only=True):
    """A write that may be bound to a lock."""

    lock: LockName = None
    token: Token = None

    @property
    def fence(self) -> Fence | None:
        """The fence of the write."""
        if (self.lock is None) != (self.token is None):
            raise InvalidValue("lock and token are given together, as the tool lock returned them")
        return None if self.lock is None or self.token is None else Fence(name=self.lock, token=self.token)


class Put(Fenced, frozen=True, kw_only=True):
    """Arguments of put."""

    key: Key
    value: Value
    revision: Read
    ttl: TTL = None


class Change(Fenced, frozen=True, kw_only=True):
    """Arguments of edit."""

    key: Key
    revision: Read
    set: Annotated[
        dict[str, Any],
        Meta(
            description="New values by their paths: {'/status': 'done', '/steps/0/owner': 'me'}. "
            "A path that ends in '/-' adds an item to a list."
        ),
    ] = msgspec.field(default_factory=dict)
    remove: Annotated[list[str], Meta(description="Paths of members to remove, such as ['/draft'].")] = msgspec.field(
        default_factory=list
    )


class Append(Fenced, frozen=True, kw_only=True):
    """Arguments of append."""

    prefix: Annotated[str, Meta(description="What the new key begins with, such as 'results/'.")]
    value: Value
    ttl: TTL = None


class Delete(Fenced, frozen=True, kw_only=True):
    """Arguments of delete."""

    key: Key
    revision: Annotated[int, Meta(ge=1, le=INT_MAX, description="The revision that get returned.")]


class Page(Strict, frozen=True, kw_only=True):
    """Arguments of list."""

    prefix: Annotated[str, Meta(description="What the keys begin with, such as 'task/'. Empty for all.")] = ""
    values: Annotated[bool, Meta(description="Whether to show short values too.")] = False
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX, description="How many at most.")] = PAGE
    after: Annotated[str | None, Meta(description="To go on: the 'next' of the answer before.")] = None


class Await(Strict, frozen=True, kw_only=True):
    """Arguments of wait."""

    key: Annotated[str | None, Meta(description="Wait for changes of this key. Give key or prefix.")] = None
    prefix: Annotated[str | None, Meta(description="Wait for changes of all keys that begin so.")] = None
    after: Annotated[
        Revision | None,
        Meta(description="Changes after this revision: of your last get, put, edit or wait. Else from now on."),
    ] = None
    seconds: Annotated[float, Meta(ge=0, le=60, description="How long to wait at most.")] = 30


class Lock(Strict, frozen=True, kw_only=True):
    """Arguments of lock."""

    name: Annotated[str, Meta(description="What the lock is called. It need not be a key.")]
    ttl: Annotated[
        float, Meta(gt=0, description="Seconds until it ends by itself unless you renew it. Be generous.")
    ] = 120
    wait: Annotated[float, Meta(ge=0, le=WAIT_S_MAX, description="Seconds to wait if another agent holds it.")] = 0
    holder: Annotated[str | None, Meta(description="Your name, which others see while you hold it.")] = None


class Held(Strict, frozen=True, kw_only=True):
    """Arguments of unlock."""

    name: Annotated[str, Meta(description="The name of the lock.")]
    token: Annotated[Int64, Meta(description="The token that lock returned.")]


class Renew(Held, frozen=True, kw_only=True):
    """Arguments of renew."""

    ttl: Annotated[float, Meta(gt=0, description="Seconds from now until it ends by itself.")] = 120


# The shapes of answers --------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer. Members that say nothing are left out."""


class Found(Answer, frozen=True, kw_only=True):
    """An entry."""

    exists: bool = msgspec.field()
    key: str = msgspec.field()
    revision: Annotated[int, Meta(description="Pass it to put, edit and delete. 0 if there is no such key.")]
    value: Any = UNSET
    is_hidden: Annotated[bool, Meta(description="There is a value, and you may not see it.")] = False
    expires_at: Annotated[datetime | UnsetType, Meta(description="When it ends by itself.")] = UNSET
    next_offset: Annotated[int | UnsetType, Meta(description="The value goes on: call get with this offset.")] = UNSET
    members: Annotated[
        dict[str, int] | UnsetType,
        Meta(description="The value is too long. Its members with their lengths: call get with one of these paths."),
    ] = UNSET


class Written(Answer, frozen=True, kw_only=True):
    """What a write left."""

    key: str
    revision: Annotated[int, Meta(description="The revision of what you wrote; pass it to your next write.")]
    others_changed: Annotated[
        list[str] | UnsetType,
        Meta(description="Others have changed these members since you read. They were kept: call get to see them."),
    ] = UNSET


class Deleted(Answer, frozen=True, kw_only=True):
    """What a delete did."""

    key: str
    deleted: bool


class Line(Answer, frozen=True, kw_only=True):
    """An entry in a list."""

    key: str
    revision: int
    value: Any = UNSET
    value_chars: Annotated[int | UnsetType, Meta(description="The value is longer than a list shows: use get.")] = UNSET
    expires_at: Annotated[datetime | UnsetType, Meta(description="When it ends by itself.")] = UNSET


class Listing(Answer, frozen=True, kw_only=True):
    """A page of entries."""

    entries: list[Line]
    next: Annotated[str | UnsetType, Meta(description="There are more: call list with this as after.")] = UNSET
    is_hidden: Annotated[bool, Meta(description="You may not see the values.")] = False


class Changed(Answer, frozen=True, kw_only=True):
    """A change."""

    key: str
    op: Annotated[str, Meta(description="put, patch, touch, delete or expire.")]
    revision: int


class Changes(Answer, frozen=True, kw_only=True):
    """What changed."""

    changes: list[Changed]
    revision: Annotated[int, Meta(description="Pass it as after to your next wait.")]
    missed: Annotated[bool, Meta(description="Changes before were not kept: read again what you need.")] = False


class Locked(Answer, frozen=True, kw_only=True):
    """A lock that is held now."""

    name: str
    token: Annotated[int, Meta(description="Pass it, with the name as lock, to every write that the lock protects.")]
    expires_in: Annotated[float, Meta(description="Seconds until it ends by itself.")]


class Unlocked(Answer, frozen=True, kw_only=True):
    """A lock that was given back."""

    name: str
    released: bool


# What they do -----------------------------------------------------------------


async def read_entry(space: Workspace, key: str, path: str = "", offset: int = 0) -> Found:
    """An entry, or a part of it that fits into an answer."""
    entry, may_see = await space.read(key)
    if entry is None:
        return Found(exists=False, key=key, revision=0)
    facts: dict[str, Any] = {"exists": True, "key": key, "revision": entry.revision, "expires_at": _end_of(entry)}
    if not may_see:
        return Found(**facts, is_hidden=True)
    part = values.cut(values.find(entry.value, path), path=path, offset=offset)
    return Found(**facts, value=part.value, next_offset=part.next_offset, members=part.members)


async def read_page(space: Workspace, page: Page) -> Listing:
    """A page of keys, with short values where they are wanted, that fits into an answer."""
    entries, has_more, has_values = await space.page(
        page.prefix, after=page.after, limit=page.limit, values=page.values
    )
    lines: list[Line] = []
    size = 0
    for entry in entries:
        line = _line(entry, with_value=has_values)
        size += len(msgspec.json.encode(line))
        if lines and size > values.CHARS_MAX:
            has_more = True
            break
        lines.append(line)
    is_hidden = page.values and not has_values and bool(lines)
    return Listing(entries=lines, next=lines[-1].key if has_more else UNSET, is_hidden=is_hidden)


def _line(entry: Entry, *, with_value: bool) -> Line:
    facts: dict[str, Any] = {"key": entry.key, "revision": entry.revision, "expires_at": _end_of(entry)}
    if not with_value:
        return Line(**facts)
    if (chars := values.size_of(entry.value)) > VALUE_CHARS_MAX:
        return Line(**facts, value_chars=chars)
    return Line(**facts, value=values.cut(entry.value).value)


def _end_of(entry: Entry) -> datetime | UnsetType:
    return UNSET if entry.expires_at is None else entry.expires_at


async def _get(space: Workspace, call: Get) -> Found:
    return await read_entry(space, call.key, call.path, call.offset)


async def _put(space: Workspace, call: Put) -> Written:
    expect = Expect(revision=call.revision) if call.revision else Expect(absent=True)
    put = requests.Put(key=call.key, value=call.value, ttl=call.ttl, expect=expect, fence=call.fence)
    return _written((await space.run(OPERATIONS["put"], put))["entry"])


async def _edit(space: Workspace, call: Change) -> Written:
    if not call.set and not call.remove:
        raise InvalidValue("an edit has set, remove, or both")
    if not space.may_see(key_span(call.key)):
        # Its answer, and its errors, name members that are there.
        raise PermissionDenied("to edit takes the rights read and reveal besides write: use put or append")
    edit = Edit(key=call.key, revision=call.revision, set=call.set, remove=call.remove, fence=call.fence)
    found = await space.run(EDIT, edit)
    others: list[str] = found["others_changed"][: values.MEMBERS_MAX]
    return Written(key=call.key, revision=found["revision"], others_changed=others or UNSET)


async def _append(space: Workspace, call: Append) -> Written:
    append = requests.Append(prefix=call.prefix, value=call.value, ttl=call.ttl, fence=call.fence)
    return _written((await space.run(OPERATIONS["append"], append))["entry"])


def _written(entry: dict[str, Any]) -> Written:
    return Written(key=entry["key"], revision=entry["revision"])


async def _delete(space: Workspace, call: Delete) -> Deleted:
    delete = requests.Delete(key=call.key, expect=Expect(revision=call.revision), fence=call.fence)
    return Deleted(key=call.key, deleted=(await space.run(OPERATIONS["delete"], delete))["deleted"])


async def _wait(space: Workspace, call: Await) -> Changes:
    if (call.key is None) == (call.prefix is None):
        raise InvalidValue("wait for a key or for a prefix: give one of them")
    if call.key is not None and call.key.endswith("*"):
        raise InvalidValue("a key that ends in * cannot be waited for: wait for a prefix")
    pattern = call.key if call.key is not None else f"{call.prefix}*"
    found = await space.run(WAIT, Wait(pattern=pattern, after=call.after, seconds=call.seconds))
    return msgspec.convert(found, Changes)


async def _lock(space: Workspace, call: Lock) -> Locked:
    lock = requests.Lock(name=call.name, ttl=call.ttl, wait=call.wait, holder=call.holder)
    token = (await space.run(OPERATIONS["lock"], lock))["token"]
    return Locked(name=call.name, token=token, expires_in=call.ttl)


async def _renew(space: Workspace, call: Renew) -> Locked:
    await space.run(OPERATIONS["refresh"], requests.Refresh(name=call.name, token=call.token, ttl=call.ttl))
    return Locked(name=call.name, token=call.token, expires_in=call.ttl)


async def _unlock(space: Workspace, call: Held) -> Unlocked:
    await space.run(OPERATIONS["unlock"], requests.Unlock(name=call.name, token=call.token))
    return Unlocked(name=call.name, released=True)


# The table --------------------------------------------------------------------


class Tool(NamedTuple):
    """A row of the table.

    Attributes:
        reads: Whether it changes nothing.
        ends: Whether it may end or replace what is there.
    """

    name: str
    title: str
    description: str
    call: type[Strict]
    answer: type[Answer]
    run: Callable[[Workspace, Any], Awaitable[Answer]]
    reads: bool = False
    ends: bool = False


TOOLS: Final[dict[str, Tool]] = {
    tool.name: tool
    for tool in (
        Tool(
            "get",
            "Read an entry",
            "Read the value under a key, and its revision, which you pass to put, edit and delete. A long value comes "
            "in parts: follow next_offset, or read one of the members by its path.",
            Get,
            Found,
            _get,
            reads=True,
        ),
        Tool(
            "put",
            "Replace a value",
            "Replace the whole value under a key, if it is still at the revision that you have read; with revision 0, "
            "make it, if it is not there. If others wrote meanwhile, nothing is written, and the answer says what they "
            "changed. To change only a part of a document, edit is better: it rarely conflicts.",
            Put,
            Written,
            _put,
            ends=True,
        ),
        Tool(
            "edit",
            "Change members",
            "Change or remove members of a JSON object, by their paths. Pass the revision that you have read. Members "
            "that others have changed since then are kept; only if you and they changed the same member is it a "
            "conflict, and then nothing is written. With revision 0 the object is made if it is not there.",
            Change,
            Written,
            _edit,
        ),
        Tool(
            "append",
            "Add an entry",
            "Put a value under a new key: the prefix and a growing number. Any number of agents can append at once, "
            "and each entry is kept, in the order of the writes. Read them with list and values=true.",
            Append,
            Written,
            _append,
        ),
        Tool(
            "delete",
            "Delete an entry",
            "End an entry, if it is still at the revision that you have read.",
            Delete,
            Deleted,
            _delete,
            ends=True,
        ),
        Tool(
            "list",
            "List entries",
            "List the keys that begin with a prefix, in order, with their revisions; with values=true also values that "
            "are short. If the answer has 'next', there are more.",
            Page,
            Listing,
            read_page,
            reads=True,
        ),
        Tool(
            "wait",
            "Wait for a change",
            "Wait until a key, or a key that begins with a prefix, changes, and return what changed. No changes means "
            "that the time was over. Pass the revision of your last read or wait as after, so that you miss nothing.",
            Await,
            Changes,
            _wait,
            reads=True,
        ),
        Tool(
            "lock",
            "Take a lock",
            "Take a lock, so that no other agent does the same work at the same time. If another one holds it, the "
            "answer says who and for how long. Pass name and token with each write that the lock protects (as lock and "
            "token), renew it before its time is over, and give it back with unlock.",
            Lock,
            Locked,
            _lock,
        ),
        Tool("renew", "Keep a lock", "Let a lock that you hold last from now on.", Renew, Locked, _renew),
        Tool("unlock", "Give a lock back", "Give back a lock that you hold.", Held, Unlocked, _unlock),
    )
}


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a type, with an object at its root, as MCP wants it."""
    (root,), parts = msgspec.json.schema_components([kind])
    schema = dict(parts.pop(str(root["$ref"]).rpartition("/")[2]))
    # The docstrings are for programmers; the description of the tool is for models.
    schema.pop("title", None)
    schema.pop("description", None)
    return {**schema, "$defs": parts} if parts else schema
