"""The query parameters and the headers of HTTP: a row for each, with the members of a request that it becomes.

A row reads the text that was sent and raises ValueError for a malformed one; `limpet.server.http` adds the name of the
parameter. The headers of a response are made here too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import format_datetime
from json import dumps
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote_to_bytes

from limpet.errors import InvalidValue
from limpet.keys import PAGE_MAX
from limpet.server.requests import parse

__all__ = ["Members", "Parameter", "entry_headers", "is_current", "percent_decode"]

Members = dict[str, Any]

META_HEADER_MAX: Final = 4096


class Parameter(NamedTuple):
    """A query parameter or a header.

    Attributes:
        read: Returns the members that its text becomes. Raises ValueError with a message that does not quote the text.
        repeats: Whether it may be given several times; then each adds to a list.
    """

    place: Literal["query", "header"]
    name: str
    read: Callable[[str], Members]
    schema: Mapping[str, Any]
    text: str
    repeats: bool = False


# Readers ----------------------------------------------------------------------


def _text(member: str) -> Callable[[str], Members]:
    return lambda given: {member: given}


def _whole(member: str) -> Callable[[str], Members]:
    return lambda given: {member: _integer(given)}


def _flag(member: str) -> Callable[[str], Members]:
    def read(given: str) -> Members:
        if given not in ("true", "false"):
            raise ValueError("give true or false")
        return {member: given == "true"}

    return read


def _integer(given: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", given):
        raise ValueError("give a whole number")
    return int(given)


def _ttl(given: str) -> Members:
    if given in ("keep", "never"):
        return {"keep_ttl": True} if given == "keep" else {"ttl": None}
    if not re.fullmatch(r"-?[0-9]{1,12}(\.[0-9]{1,9})?", given):
        raise ValueError("give seconds, or one of the words keep and never")
    return {"ttl": float(given) if "." in given else int(given)}


def _where(given: str) -> Members:
    found = re.fullmatch(r"(.+?):(?:(exists)|(eq|ne|lt|le|gt|ge|in|not_in):(.*))", given, re.DOTALL)
    if found is None:
        raise ValueError("write field:exists, or field:op:json with an op of eq, ne, lt, le, gt, ge, in, not_in")
    field, exists, op, value = found.groups()
    return {"where": {"field": field, "op": exists} if exists else _test(field, op, value)}


def _test(field: str, op: str, value: str) -> Members:
    return {"field": field, "op": op, "value": parse(value.encode(errors="surrogatepass"))}


def _position(member: str) -> Callable[[str], Members]:
    """A position, or a revision of this store."""
    return lambda given: {member: int(given) if re.fullmatch(r"[0-9]{1,18}", given) else given}


def _request_id(given: str) -> Members:
    """A name in visible ASCII, also as the quoted string that the draft of Idempotency-Key wants."""
    if not re.fullmatch(r"[!-~]+", given):
        raise ValueError("give visible ASCII characters without spaces")
    return {"request_id": given[1:-1] if len(given) > 2 and given[0] == given[-1] == '"' else given}


def _kv_request_id(given: str) -> Members:
    return {"requestId": _request_id(given)["request_id"]}


def _fence(given: str) -> Members:
    name, mark, token = given.rpartition(";")
    if not mark:
        raise ValueError("write name;token, with the name percent-encoded")
    return {"fence": {"name": percent_decode(name.encode("latin-1")), "token": _integer(token.strip())}}


def _meta(given: str) -> Members:
    # Starlette reads headers as Latin-1, and JSON is UTF-8.
    return {"meta": parse(given.encode("latin-1"))}


_TAG: Final = re.compile(r'\s*(W/)?"([^"\x00-\x20\x7f]*)"\s*(?:,|\Z)')


def _tags(given: str) -> list[tuple[bool, str]]:
    """Entity tags: whether each is weak, and its text."""
    found, at = [], 0
    while at < len(given):
        tag = _TAG.match(given, at)
        if tag is None:
            raise ValueError('give * or entity tags, such as "42"')
        found.append((tag[1] is not None, tag[2]))
        at = tag.end()
    return found


def _if_match(given: str) -> Members:
    if given.strip() == "*":
        return {"expect": {"absent": False}}
    tags = _tags(given)
    if len(tags) != 1:
        raise ValueError("name one entity tag, or *")
    ((is_weak, tag),) = tags
    # No entry has revision 0, so a tag that is none of ours is a conflict, which reports the revision found.
    ours = not is_weak and re.fullmatch(r"[1-9][0-9]{0,17}", tag)
    return {"expect": {"revision": int(tag) if ours else 0}}


def _if_none_match(given: str) -> Members:
    if given.strip() != "*":
        raise ValueError("a write takes * here: the key must not exist")
    return {"expect": {"absent": True}}


def is_current(given: str, revision: int) -> bool:
    """Whether an ``If-None-Match`` names this revision. Weak tags count: nothing else has this number."""
    try:
        return given.strip() == "*" or any(tag == str(revision) for _, tag in _tags(given))
    except ValueError as problem:
        raise InvalidValue(f"If-None-Match: {problem}") from None


def percent_decode(raw: bytes) -> str:
    """Decode a part of a URL. Raises ValueError if it is not percent-encoded UTF-8."""
    if re.search(rb"%(?![0-9A-Fa-f]{2})", raw):
        raise ValueError("a percent sign is followed by two hexadecimal digits")
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise ValueError("percent-encoded characters are UTF-8") from None


# The parameters ---------------------------------------------------------------

_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
_BOOLEAN: Final = {"type": "boolean"}
_SECONDS: Final = {
    "type": "string",
    "pattern": r"^([0-9]{1,9}(\.[0-9]{1,3})?|keep|never)$",
    "examples": ["60", "0.5", "never"],
}
_TAG_OR_ANY: Final = {"type": "string", "pattern": r'^(\*|"[0-9]{1,18}")$', "examples": ['"42"', "*"]}
_ANY: Final = {"type": "string", "enum": ["*"]}
_TAGS: Final = {"type": "string", "pattern": r'^(\*|"[0-9]{1,18}"(, "[0-9]{1,18}")*)$', "examples": ['"41", "42"']}
_NAME: Final = {"type": "string", "pattern": "^[!#-~]{1,200}$"}
_HELD: Final = {
    "type": "string",
    "pattern": "^[A-Za-z0-9._~/-]{1,200};[0-9]{1,18}$",
    "examples": ["nightly%2Freport;42"],
}
_PAGE: Final = {"type": "integer", "minimum": 1, "maximum": PAGE_MAX}

PREFIX: Final = Parameter("query", "prefix", _text("prefix"), _STRING, "Only what starts with this.")
AFTER: Final = Parameter("query", "after", _text("after"), _STRING, "Go on after this key.")
REVERSE: Final = Parameter("query", "reverse", _flag("reverse"), _BOOLEAN, "Whether the last ones come first.")
DELIMITER: Final = Parameter(
    "query", "delimiter", _text("delimiter"), _STRING, "What ends the name of a folder; `/` unless given."
)
BEFORE: Final = Parameter("query", "before", _whole("before"), _INTEGER, "Only changes before this revision.")
LIMIT: Final = Parameter("query", "limit", _whole("limit"), _PAGE, "How many at most.")
VALUES: Final = Parameter("query", "values", _flag("values"), _BOOLEAN, "Whether values come along.")
WHERE: Final = Parameter(
    "query",
    "where",
    _where,
    {"type": "array", "items": {"type": "string", "examples": ['state:ne:"done"', "worker:exists"]}},
    "`field:op:json` or `field:exists`. All of them must hold.",
    repeats=True,
)
FIELD: Final = Parameter(
    "query", "field", _text("get"), {"type": "array", "items": _STRING}, "Only these fields.", repeats=True
)
PATTERN: Final = Parameter(
    "query", "pattern", _text("pattern"), _STRING, "`*`, `something*`, or one exact key. All keys unless given."
)
INITIAL: Final = Parameter(
    "query", "initial", _flag("initial"), _BOOLEAN, "Whether what there is comes first, and then an event `synced`."
)
POSITION: Final = Parameter(
    "query", "after", _position("after"), _STRING, "Resume after this position, or after this revision."
)
LAST_EVENT_ID: Final = Parameter(
    "header",
    "Last-Event-ID",
    _position("last_event_id"),
    _STRING,
    "Resume after this event. Goes before `after` and `initial`.",
)
TTL_QUERY: Final = Parameter("query", "ttl", _ttl, _SECONDS, "As `Limpet-TTL`.")
TTL: Final = Parameter(
    "header",
    "Limpet-TTL",
    _ttl,
    _SECONDS,
    "Seconds until it expires; `never`, the default; or `keep` to leave it as it is.",
)
IF_MATCH: Final = Parameter(
    "header", "If-Match", _if_match, _TAG_OR_ANY, "The entity tag that the key must have, or `*`: it must exist."
)
IF_NONE_MATCH: Final = Parameter("header", "If-None-Match", _if_none_match, _ANY, "`*`: the key must not exist.")
UNLESS_CURRENT: Final = Parameter(
    "header",
    "If-None-Match",
    lambda _: {},
    _TAGS,
    "Entity tags that the caller has: answered by 304 if one is current.",
    repeats=True,
)
REQUEST_ID: Final = Parameter(
    "header",
    "Limpet-Request-Id",
    _request_id,
    _NAME,
    "Makes the request safe to repeat for ten minutes: a retry gets the first answer.",
)
IDEMPOTENCY_KEY: Final = Parameter("header", "Idempotency-Key", _request_id, _NAME, "As `Limpet-Request-Id`.")
FENCE: Final = Parameter(
    "header",
    "Limpet-Fence",
    _fence,
    _HELD,
    "`name;token` of a lock that must be held, its name percent-encoded.",
)
META: Final = Parameter(
    "header",
    "Limpet-Meta",
    _meta,
    {"type": "string", "contentMediaType": "application/json", "examples": ['{"by":"worker-3"}']},
    "A small JSON object to keep beside the value.",
)
TOKEN: Final = Parameter("header", "Limpet-Token", _whole("token"), _INTEGER, "The token of the lock.")
TOKEN_QUERY: Final = Parameter("query", "token", _whole("token"), _INTEGER, "As `Limpet-Token`.")
REASON: Final = Parameter(
    "header", "Limpet-Reason", _text("reason"), _STRING, "Why another's lock is ended, by an admin."
)
REASON_QUERY: Final = Parameter("query", "reason", _text("reason"), _STRING, "As `Limpet-Reason`.")

PURPOSE: Final = Parameter("query", "purpose", _text("purpose"), _STRING, "Only what is for this.")
LAST_WRITER: Final = Parameter(
    "query", "lastWriter", _text("lastWriter"), _STRING, "Who writes: `<agent>:<directive>`, or a service account."
)
EXPECTED_VERSION: Final = Parameter(
    "query", "expectedVersion", _whole("expectedVersion"), _INTEGER, "The version that the key must have."
)
KV_ONCE: Final = (
    REQUEST_ID._replace(read=_kv_request_id),
    IDEMPOTENCY_KEY._replace(read=_kv_request_id),
)
"""The headers that make a semantic write safe to repeat, as the member ``requestId`` of its body does."""

CONDITIONS: Final = (IF_MATCH, IF_NONE_MATCH, FENCE, REQUEST_ID, IDEMPOTENCY_KEY)
"""What every write may have: conditions, a fence, and a request id."""


# The headers of a response ----------------------------------------------------


def entry_headers(entry: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """The headers of a response that describe an entry, as they are sent."""
    revision = b"%d" % entry["revision"]
    found = [
        (b"etag", b'"%s"' % revision),
        (b"last-modified", _http_date(entry["updated_at"].replace(microsecond=0))),
        (b"limpet-version", b"%d" % entry["version"]),
        (b"limpet-revision", revision),
        (b"limpet-created-at", _timestamp(entry["created_at"])),
        (b"limpet-updated-at", _timestamp(entry["updated_at"])),
    ]
    if entry["expires_at"] is not None:
        found.append((b"limpet-expires-at", _timestamp(entry["expires_at"])))
    if entry["meta"]:
        meta = dumps(entry["meta"], separators=(",", ":"))
        # Many clients give up at headers of eight thousand bytes.
        if len(meta) <= META_HEADER_MAX:
            found.append((b"limpet-meta", meta.encode("ascii")))
    if entry["writer"] is not None:
        # Headers are ASCII, and names are not: as a JSON string, like the meta.
        found.append((b"limpet-writer", dumps(entry["writer"]).encode("ascii")))
    return found


@functools.lru_cache(maxsize=1024)
def _http_date(second: datetime) -> bytes:
    """A date as HTTP writes it. Entries are often read soon after they were written, many of one second."""
    return format_datetime(second, usegmt=True).encode("ascii")


def _timestamp(at: datetime) -> bytes:
    """A time of an entry, which is in UTC."""
    return at.isoformat(timespec="milliseconds").removesuffix("+00:00").encode("ascii") + b"Z"
