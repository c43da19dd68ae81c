"""The routes of HTTP, one row each: a method and a path, the operation, and how its request and its reply are shaped.

A row is data. `limpet.server.http` reads the parameters and the body of a request by its row, has the dispatcher run
the operation, and passes the answer to `reply`. Where the parameters are not the members of the operation's request
as they are, `shape` makes them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers
from starlette.responses import Response

from limpet.codec import Kind
from limpet.errors import NotFound, TypeMismatch
from limpet.model import Entry
from limpet.protocol.json import entry_as_json, plain
from limpet.server import requests
from limpet.server.operations import FETCH, OPERATIONS, Operation
from limpet.server.parameters import (
    AFTER,
    BEFORE,
    CONDITIONS,
    DELIMITER,
    EXPECTED_VERSION,
    FENCE,
    FIELD,
    IDEMPOTENCY_KEY,
    INITIAL,
    KV_ONCE,
    LAST_EVENT_ID,
    LAST_WRITER,
    LIMIT,
    META,
    PATTERN,
    POSITION,
    PREFIX,
    PURPOSE,
    REASON,
    REASON_QUERY,
    REQUEST_ID,
    REVERSE,
    TOKEN,
    TOKEN_QUERY,
    TTL,
    TTL_QUERY,
    UNLESS_CURRENT,
    VALUES,
    WHERE,
    Members,
    Parameter,
    entry_headers,
    is_current,
)

__all__ = [
    "BYTES_TYPE",
    "ENDPOINTS",
    "JSON_TYPE",
    "RECORD_TYPE",
    "SUMMARIES",
    "VALUE_TYPES",
    "Endpoint",
    "Reply",
    "ReplyDoc",
    "json_response",
]

JSON_TYPE: Final = "application/json"
BYTES_TYPE: Final = "application/octet-stream"
RECORD_TYPE: Final = "application/vnd.limpet.record+json"

VALUE_TYPES: Final[Mapping[str, Sequence[str]]] = {
    "value": (JSON_TYPE, BYTES_TYPE, RECORD_TYPE),
    "bytes": (BYTES_TYPE,),
    "record": (RECORD_TYPE, JSON_TYPE),
}
"""The media types of a body that is a value to store, by the body of an endpoint."""

Answer = dict[str, Any]
MakeReply = Callable[[Answer, Any, Headers], Response]
"""Makes a response of an answer, the operation's request, and the headers of the HTTP request."""


class ReplyDoc(NamedTuple):
    """A reply in the OpenAPI description, of one status: a schema by its name, media types, and headers."""

    schema: str | None = None
    media_types: Sequence[str] = (JSON_TYPE,)
    headers: Sequence[str] = ()


RawHeaders = Sequence[tuple[bytes, bytes]]
"""Headers as they are sent: their names in lower case."""


class Reply(Response):
    """A response whose headers are bytes already. Starlette takes text, and encodes each header each time."""

    def __init__(self, body: bytes, status: int = 200, headers: RawHeaders = (), *, media_type: str | None) -> None:
        self.status_code = status
        self.background = None
        self.body = body
        self.raw_headers = [*headers]
        if status not in (204, 304):
            self.raw_headers.append((b"content-length", b"%d" % len(body)))
        if media_type is not None:
            self.raw_headers.append((b"content-type", media_type.encode("ascii")))


def json_response(document: Any, status: int = 200, headers: RawHeaders = ()) -> Response:
    """A JSON document as a response."""
    return Reply(msgspec.json.encode(document), status, headers, media_type=JSON_TYPE)


# From an answer to a response -------------------------------------------------


def _reply_json(answer: Answer, request: Any, headers: Headers) -> Response:
    return json_response(answer)


def _reply_created(answer: Answer, request: Any, headers: Headers) -> Response:
    return json_response(answer, 201)


def _reply_done(answer: Answer, request: Any, headers: Headers) -> Response:
    return Reply(b"", 204, media_type=None)


def _reply_deleted(answer: Answer, request: Any, headers: Headers) -> Response:
    if not answer["deleted"]:
        raise NotFound(request.key)
    return Reply(b"", 204, media_type=None)


def _reply_value(answer: Answer, request: requests.Entry, headers: Headers) -> Response:
    """The value itself, under its media type."""
    entry = _require_entry(answer, request)
    described = _describe(entry)
    if _is_current(headers, entry):
        return Reply(b"", 304, described, media_type=None)
    value = entry.value
    body = value if isinstance(value, bytes) else msgspec.json.encode(plain(value))
    return Reply(body, 200, described, media_type=_media_type(entry))


def _reply_remaining(answer: Answer, request: requests.Remaining, headers: Headers) -> Response:
    if not answer["exists"]:
        raise NotFound(request.key)
    return json_response({"remaining": answer["remaining"]})


def _reply_bytes(answer: Answer, request: requests.Entry, headers: Headers) -> Response:
    entry = _require_entry(answer, request)
    if entry.kind != "bytes":
        raise TypeMismatch(entry.key, expected="raw bytes", found=str(entry.kind))
    return _reply_value(answer, request, headers)


def _reply_head(answer: Answer, request: requests.Entry, headers: Headers) -> Response:
    entry = _require_entry(answer, request)
    response = Reply(b"", 304 if _is_current(headers, entry) else 200, media_type=_media_type(entry))
    # Without its length, which is not known without encoding the value.
    response.raw_headers = [*_describe(entry), response.raw_headers[-1]]
    return response


def _require_entry(answer: Answer, request: requests.Entry) -> Entry:
    if not answer["exists"]:
        raise NotFound(request.key)
    entry: Entry = answer["entry"]
    return entry


def _describe(entry: Entry) -> RawHeaders:
    return entry_headers(entry_as_json(entry, with_value=False))


def _media_type(entry: Entry) -> str:
    return _MEDIA_TYPES.get(entry.kind, JSON_TYPE)


_MEDIA_TYPES: Final[Mapping[Kind | None, str]] = {"bytes": BYTES_TYPE, "record": RECORD_TYPE}


def _is_current(headers: Headers, entry: Entry) -> bool:
    known = headers.getlist("If-None-Match")
    return bool(known) and is_current(", ".join(known), entry.revision)


def _reply_written(answer: Answer, request: Any, headers: Headers) -> Response:
    """An entry after a write. The first version of a key means that the key was created."""
    entry = answer["entry"]
    return json_response(entry, 201 if entry["version"] == 1 else 200, entry_headers(entry))


def _reply_patched(answer: Answer, request: Any, headers: Headers) -> Response:
    return _reply_written({"entry": answer["entries"][0]}, request, headers)


def _reply_touched(answer: Answer, request: requests.Touch, headers: Headers) -> Response:
    if not answer["exists"]:
        raise NotFound(request.key)
    return json_response(answer["entry"], headers=entry_headers(answer["entry"]))


def _reply_fields(answer: Answer, request: requests.FieldsOf, headers: Headers) -> Response:
    if not answer["exists"]:
        raise NotFound(request.key)
    return json_response(answer["fields"])


def _reply_taken(answer: Answer, request: requests.Take, headers: Headers) -> Response:
    if not answer["exists"]:
        raise NotFound(request.key)
    return json_response({"value": answer["value"]})


def _reply_keys(answer: Answer, request: Any, headers: Headers) -> Response:
    return json_response({**answer, "cursor": answer["keys"][-1] if answer["truncated"] else None})


def _reply_envelope(answer: Answer, request: requests.KvGet, headers: Headers) -> Response:
    if not answer["exists"]:
        raise NotFound(request.key)
    return json_response({name: member for name, member in answer.items() if name != "exists"})


def _reply_put(answer: Answer, request: Any, headers: Headers) -> Response:
    return json_response(answer, 201 if answer["version"] == 1 else 200)


# From parameters to the members of a request ----------------------------------


class Patch(requests.Strict, frozen=True, kw_only=True):
    """Fields of a record to write, and fields to drop."""

    set: dict[str, Any] = msgspec.field(default_factory=dict)
    unset: list[str] = msgspec.field(default_factory=list)
    if_exists: bool = False
    ttl: requests.TTL | UnsetType = UNSET


def _shape_head(members: Members, caller: str) -> Members:
    return {**members, "with_value": False}


def _shape_fields(members: Members, caller: str) -> Members:
    return {"get": None, **members}


def _shape_patch(members: Members, caller: str) -> Members:
    """A batch of one write, which may have guards that a record's own verb has not."""
    key, expect, fence, request_id = (members.pop(name, None) for name in ("key", "expect", "fence", "request_id"))
    patch = requests.request_of(Patch, members)
    write = {"op": "set", "key": key, "fields": patch.set, "unset": patch.unset, "if_exists": patch.if_exists}
    if patch.ttl is not UNSET:
        write["ttl"] = patch.ttl
    batch: Members = {"writes": [write], "request_id": request_id}
    if expect is not None:
        batch["guards"] = [{"key": key, "expect": expect}]
    if fence is not None:
        batch["fences"] = [fence]
    return batch


def _shape_swap(members: Members, caller: str) -> Members:
    beside: Members = {name: members.pop(name) for name in ("key", "fence", "request_id") if name in members}
    return {**beside, "swap": members}


def _shape_lock(members: Members, caller: str) -> Members:
    return {"holder": caller, **members}


def _shape_watch(members: Members, caller: str) -> Members:
    # A browser that lost its connection requests the same URL again, and adds the last event that it has received.
    last = members.pop("last_event_id", None)
    return members if last is None else {**members, "after": last, "initial": False}


# The table --------------------------------------------------------------------


class Endpoint(NamedTuple):
    """A row of the table of routes.

    Attributes:
        path: As Starlette takes it. Its parameters are members of the request, the namespace aside.
        name: Its name in the description, and in the log for a request that is refused before its operation runs.
        operation: The operation that it runs; None where the path names it.
        reply: Makes the response.
        replies: The replies of a success, by status, for the description.
        parameters: The query parameters and the headers that it takes.
        body: What the body holds: a value to store, or the members of this shape that the path does not give.
        shape: Makes the members of the operation's request, of the parameters and the name of the caller.
        runs: A ``wait`` may take long and ends when its caller leaves; a ``stream`` sends events until it is closed.
    """

    method: str
    path: str
    name: str
    operation: Operation | None
    reply: MakeReply
    replies: Mapping[int, ReplyDoc]
    parameters: Sequence[Parameter] = ()
    body: type[msgspec.Struct] | Literal["value", "bytes", "record"] | None = None
    shape: Callable[[Members, str], Members] | None = None
    runs: Literal["once", "wait", "stream"] = "once"


SPACE: Final = "/v1/{namespace}"
ENTRY_HEADERS: Final = ("ETag", "Limpet-Version", "Limpet-Revision")


def _keyed(verb: str) -> str:
    # The verb stands before the key, because a key may hold any character.
    return f"{SPACE}/{verb}/{{key:key}}"


def _ok(schema: str) -> dict[int, ReplyDoc]:
    return {200: ReplyDoc(schema)}


def _endpoints() -> Sequence[Endpoint]:
    run = OPERATIONS
    entries, raws, records, semantic = map(_keyed, ("entries", "bytes", "records", "semantic"))
    lock = f"{SPACE}/locks/{{name:key}}"
    value = ReplyDoc(None, (JSON_TYPE, BYTES_TYPE, RECORD_TYPE), (*ENTRY_HEADERS, "Last-Modified"))
    raw = ReplyDoc(None, (BYTES_TYPE,), (*ENTRY_HEADERS, "Last-Modified"))
    entry = ReplyDoc("EntryDocument", headers=ENTRY_HEADERS)
    known = {200: ReplyDoc(), 304: ReplyDoc()}
    written, touched, done = {200: entry, 201: entry}, {200: entry}, {204: ReplyDoc()}
    timed = [*CONDITIONS, TTL, TTL_QUERY]
    once = [REQUEST_ID, IDEMPOTENCY_KEY]
    page = [PREFIX, LIMIT, AFTER]
    listed = [*page, REVERSE, WHERE, VALUES]
    resumed = [PATTERN, POSITION, INITIAL, LAST_EVENT_ID]
    token = [TOKEN, TOKEN_QUERY, REASON, REASON_QUERY]
    put = {200: ReplyDoc("EnvelopePut"), 201: ReplyDoc("EnvelopePut")}
    events = {200: ReplyDoc(None, ["text/event-stream"])}
    return [
        Endpoint("GET", entries, "get_entry", FETCH, _reply_value, {**known, 200: value}, [UNLESS_CURRENT]),
        Endpoint("HEAD", entries, "head_entry", FETCH, _reply_head, known, [UNLESS_CURRENT], None, _shape_head),
        Endpoint("PUT", entries, "put_entry", run["put"], _reply_written, written, [*timed, META], "value"),
        Endpoint("DELETE", entries, "delete_entry", run["delete"], _reply_deleted, done, CONDITIONS),
        Endpoint(
            "POST",
            f"{SPACE}/read",
            "get_entries",
            run["entries"],
            _reply_json,
            _ok("EntriesAnswer"),
            [],
            requests.Entries,
        ),
        Endpoint(
            "GET", _keyed("remaining"), "remaining", run["remaining"], _reply_remaining, _ok("RemainingAnswer"), []
        ),
        Endpoint("GET", raws, "get_bytes", FETCH, _reply_bytes, {**known, 200: raw}, [UNLESS_CURRENT]),
        Endpoint("PUT", raws, "put_bytes", run["put"], _reply_written, written, [*timed, META], "bytes"),
        Endpoint("PUT", records, "put_record", run["put"], _reply_written, written, [*timed, META], "record"),
        Endpoint(
            "GET",
            records,
            "get_record",
            run["fields"],
            _reply_fields,
            _ok("FieldsDocument"),
            [FIELD],
            None,
            _shape_fields,
        ),
        Endpoint(
            "PATCH", records, "patch_record", run["batch"], _reply_patched, written, CONDITIONS, Patch, _shape_patch
        ),
        Endpoint(
            "POST",
            _keyed("swap"),
            "swap_field",
            run["fields"],
            _reply_json,
            _ok("SwapAnswer"),
            [FENCE, *once],
            requests.Swap,
            _shape_swap,
        ),
        Endpoint(
            "POST", _keyed("incr"), "increment", run["incr"], _reply_json, _ok("CounterAnswer"), timed, requests.Incr
        ),
        Endpoint(
            "POST",
            f"{SPACE}/append/{{prefix:key}}",
            "append_entry",
            run["append"],
            _reply_written,
            {201: entry},
            [FENCE, *once, TTL, TTL_QUERY, META],
            "value",
        ),
        Endpoint(
            "POST", _keyed("take"), "take", run["take"], _reply_taken, _ok("ValueAnswer"), CONDITIONS, requests.Take
        ),
        Endpoint("POST", _keyed("touch"), "touch", run["touch"], _reply_touched, touched, timed, requests.Touch),
        Endpoint(
            "POST", f"{SPACE}/batch", "batch", run["batch"], _reply_json, _ok("BatchAnswer"), once, requests.Batch
        ),
        Endpoint("GET", f"{SPACE}/keys", "list_keys", run["list"], _reply_keys, _ok("KeysPage"), [*page, REVERSE]),
        Endpoint(
            "DELETE",
            f"{SPACE}/keys",
            "delete_keys",
            run["delete_prefix"],
            _reply_json,
            _ok("DeletedAnswer"),
            [PREFIX, LIMIT, FENCE],
        ),
        Endpoint("GET", f"{SPACE}/scan", "scan", run["scan"], _reply_json, _ok("EntriesPage"), listed),
        Endpoint("POST", f"{SPACE}/scan", "scan", run["scan"], _reply_json, _ok("EntriesPage"), [], requests.Scan),
        Endpoint(
            "GET",
            f"{SPACE}/children",
            "children",
            run["children"],
            _reply_json,
            _ok("ChildrenPage"),
            [*page, DELIMITER],
        ),
        Endpoint("GET", _keyed("history"), "history", run["history"], _reply_json, _ok("Changes"), [LIMIT, BEFORE]),
        Endpoint(
            "GET",
            f"{SPACE}/watch",
            "watch",
            run["watch"],
            _reply_json,
            events,
            resumed,
            None,
            _shape_watch,
            runs="stream",
        ),
        Endpoint("GET", f"{SPACE}/locks", "list_locks", run["locks"], _reply_json, _ok("Locks"), page),
        Endpoint(
            "POST",
            lock,
            "acquire_lock",
            run["lock"],
            _reply_created,
            {201: ReplyDoc("LockAnswer")},
            [],
            requests.Lock,
            _shape_lock,
            runs="wait",
        ),
        Endpoint("PUT", lock, "refresh_lock", run["refresh"], _reply_done, done, [TOKEN], requests.Refresh),
        Endpoint("DELETE", lock, "release_lock", run["unlock"], _reply_done, done, token),
        Endpoint(
            "GET", f"{SPACE}/outcome/{{request_id:key}}", "outcome", run["outcome"], _reply_json, _ok("OutcomeAnswer")
        ),
        Endpoint("GET", f"{SPACE}/status", "status", run["status"], _reply_json, _ok("StatusAnswer")),
        Endpoint("GET", semantic, "get_semantic", run["kv_get"], _reply_envelope, _ok("Envelope")),
        Endpoint("PUT", semantic, "put_semantic", run["kv_put"], _reply_put, put, KV_ONCE, requests.KvPut),
        Endpoint(
            "DELETE",
            semantic,
            "delete_semantic",
            run["kv_delete"],
            _reply_deleted,
            done,
            [LAST_WRITER, EXPECTED_VERSION, *KV_ONCE],
        ),
        Endpoint(
            "GET",
            f"{SPACE}/semantic",
            "list_semantic",
            run["kv_list"],
            _reply_json,
            _ok("Envelopes"),
            [PREFIX, PURPOSE, LIMIT, AFTER],
        ),
        Endpoint(
            "POST",
            f"{SPACE}/semantic",
            "batch_semantic",
            run["kv_batch"],
            _reply_json,
            _ok("EnvelopesPut"),
            KV_ONCE,
            requests.KvBatch,
        ),
        Endpoint("POST", f"{SPACE}/call/{{operation}}", "call", None, _reply_json, _ok("Answer"), [], requests.Request),
    ]


ENDPOINTS: Final = _endpoints()

SUMMARIES: Final = {
    "get_entry": "The value of a key.",
    "head_entry": "The version, revision and times of a key; its value is not looked at.",
    "put_entry": "Replace the value of a key: JSON, raw bytes, or a record.",
    "delete_entry": "End a key.",
    "get_entries": "Several entries, read at one moment, in the order of their keys.",
    "remaining": "How many seconds a key has left.",
    "get_bytes": "The value of a key that holds raw bytes.",
    "put_bytes": "Replace the value of a key by raw bytes.",
    "put_record": "Replace the value of a key by a record.",
    "get_record": "The fields of a record, or some of them.",
    "patch_record": "Write some fields of a record, or drop them, without touching the rest.",
    "swap_field": "Change a field of a record if it holds what is expected: of all who try, one wins.",
    "increment": "Add to a counter.",
    "append_entry": "Put a value under a new key: the prefix and a number that grows with each commit.",
    "take": "Get a value and end its key in one step.",
    "touch": "Change only when a key expires.",
    "batch": "Guards and writes that happen together or not at all.",
    "list_keys": "A page of keys.",
    "delete_keys": "End the keys that start with a prefix, up to the limit.",
    "scan": "A page of entries, filtered.",
    "children": "One level of keys: those directly below a prefix, and the folders there with their numbers of keys.",
    "history": "The latest changes of a key that are still in the log, oldest first.",
    "watch": "Changes as they happen, as server-sent events.",
    "list_locks": "The locks that are held now.",
    "acquire_lock": "Take a lock. What comes back is its fencing token.",
    "refresh_lock": "Extend a lock from now on.",
    "release_lock": "Give a lock back by its token; or end another's, with the right `admin` and a reason.",
    "outcome": "What became of a request.",
    "status": "The namespace at a glance.",
    "get_semantic": "A semantic entry in its envelope.",
    "put_semantic": "Put a semantic entry, if its key has the version that is expected.",
    "delete_semantic": "End a semantic entry, if its key has the version that is expected.",
    "list_semantic": "A page of semantic entries, of one purpose or of all.",
    "batch_semantic": "Puts and deletes of semantic entries that happen together or not at all.",
    "call": "Run any operation by its name, with the members of its request as JSON.",
}
"""What each endpoint does, by its name, for the description."""
