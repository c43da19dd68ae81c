"""The description of HTTP: an OpenAPI 3.1 document, made from the table of routes and the shapes of the operations.

Requests are described by the same shapes and parameters that read them. Only the answers are described here by hand;
tests check the replies of a server against them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

import limpet
from limpet.clock import TTL_S_MAX
from limpet.keys import KEY_BYTES_MAX, KEYS_MAX, PAGE_MAX
from limpet.server.http_errors import PROBLEM_TYPE
from limpet.server.http_routes import (
    BYTES_TYPE,
    JSON_TYPE,
    RECORD_TYPE,
    SUMMARIES,
    VALUE_TYPES,
    Endpoint,
    ReplyDoc,
)
from limpet.server.operations import OPERATIONS, WAIT_S_MAX
from limpet.server.parameters import Parameter
from limpet.server.requests import KV_KEY, Request

__all__ = ["describe"]

Schema = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_COMMON: Final = (400, 401, 403, 404, 405, 409, 410, 412, 413, 415, 421, 423, 429, 500, 503, 504)

# Answers ----------------------------------------------------------------------

_STRING: Final[Schema] = {"type": "string"}
_INTEGER: Final[Schema] = {"type": "integer"}
_NUMBER: Final[Schema] = {"type": "number"}
_BOOLEAN: Final[Schema] = {"type": "boolean"}
_MOMENT: Final[Schema] = {"type": "string", "format": "date-time"}
_OBJECT: Final[Schema] = {"type": "object"}
_BYTES: Final[Schema] = {"type": "string", "format": "binary"}
_VALUES: Final[dict[str, Schema]] = {JSON_TYPE: {}, BYTES_TYPE: _BYTES, RECORD_TYPE: _OBJECT}
_KIND: Final[Schema] = {"enum": ["json", "bytes", "record"]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def _members(text: str, optional: Sequence[str] = (), **members: Schema) -> Schema:
    """An object whose members are all there, but for those that are optional."""
    required = [name for name in members if name not in optional]
    return {"type": "object", "description": text, "properties": members, "required": required}


_ENVELOPE: Final[dict[str, Schema]] = {
    "key": _STRING,
    "version": _INTEGER,
    "revision": _INTEGER,
    "lastWriter": _STRING,
    "semantics": _ref("Semantics"),
    "requestId": _STRING,
    "specRef": _STRING,
    "updatedAt": _MOMENT,
    "expiresAt": _MOMENT,
    "token": _INTEGER,
}
_IN_SOME_ENVELOPES: Final = ("specRef", "expiresAt", "token")


_ANSWERS: Final[dict[str, Schema]] = {
    "Answer": {"type": "object", "description": "What the operation answers."},
    "EntryDocument": _members(
        'What is stored under a key. Raw bytes are `{"$bytes": base64}`.',
        ["value"],
        key=_STRING,
        kind=_or_null(_KIND),
        version=_INTEGER,
        revision=_INTEGER,
        created_revision=_INTEGER,
        created_at=_MOMENT,
        updated_at=_MOMENT,
        expires_at=_or_null(_MOMENT),
        size_bytes=_INTEGER,
        meta=_OBJECT,
        writer=_or_null(_STRING),
        value={},
    ),
    "RemainingAnswer": _members("The seconds left; null when it never expires.", remaining=_or_null(_NUMBER)),
    "FieldsDocument": {"type": "object", "description": "Fields of a record, by their names."},
    "SwapAnswer": _members("Whether this caller won.", swapped=_BOOLEAN),
    "CounterAnswer": _members("What the counter holds now.", value=_INTEGER),
    "ValueAnswer": _members("What was taken.", value={}),
    "KeysPage": _members(
        "Some keys, in order. When `truncated`, give `cursor` as `after` to go on.",
        keys=_list_of(_STRING),
        count=_INTEGER,
        truncated=_BOOLEAN,
        cursor=_or_null(_STRING),
    ),
    "EntriesPage": _members(
        "Some entries, in order. When `truncated`, give `cursor` as `after` to go on.",
        entries=_list_of(_ref("EntryDocument")),
        truncated=_BOOLEAN,
        cursor=_or_null(_STRING),
    ),
    "DeletedAnswer": _members(
        "How many keys were deleted. When `truncated`, there may be more: repeat the request.",
        deleted=_INTEGER,
        truncated=_BOOLEAN,
    ),
    "EntriesAnswer": _members(
        "Several entries, in the order of the keys; null for a key that is absent.",
        entries=_list_of(_or_null(_ref("EntryDocument"))),
    ),
    "ChildrenPage": _members(
        "One level of keys. When `truncated`, give `cursor` as `after` to go on.",
        children=_list_of(_members("A key or a folder.", key=_STRING, folder=_BOOLEAN, keys=_INTEGER)),
        truncated=_BOOLEAN,
        cursor=_or_null(_STRING),
    ),
    "Namespaces": _members("The namespaces that the caller may read.", namespaces=_list_of(_STRING)),
    "Change": _members(
        "What happened to a key.",
        op={"enum": ["put", "patch", "touch", "delete", "expire", "synced"]},
        key=_STRING,
        kind=_or_null(_KIND),
        version=_or_null(_INTEGER),
        revision=_INTEGER,
        commit=_INTEGER,
        position=_or_null(_STRING),
        cause=_or_null(_STRING),
        at=_or_null(_MOMENT),
        expires_at=_or_null(_MOMENT),
        meta=_or_null(_OBJECT),
        writer=_or_null(_STRING),
        value={},
    ),
    "Changes": _members(
        "The latest changes, oldest first. When `truncated`, give `cursor` as `before` for older ones.",
        changes=_list_of(_ref("Change")),
        truncated=_BOOLEAN,
        cursor=_or_null(_INTEGER),
    ),
    "BatchAnswer": _members(
        "What a batch left, write by write.",
        revision=_INTEGER,
        entries=_list_of(_or_null(_ref("EntryDocument"))),
        taken=_list_of({}),
        kept=_list_of(_STRING),
        replayed=_BOOLEAN,
    ),
    "LockDocument": _members("Who holds a lock.", name=_STRING, holder=_STRING, token=_INTEGER, remaining=_NUMBER),
    "Locks": _members(
        "Locks that are held, in order. When `truncated`, give `cursor` as `after` to go on.",
        locks=_list_of(_ref("LockDocument")),
        truncated=_BOOLEAN,
        cursor=_or_null(_STRING),
    ),
    "LockAnswer": _members("The fencing token.", token=_INTEGER),
    "OutcomeAnswer": _members(
        "Whether a request was applied, and what it left.",
        ["revision", "entries"],
        applied=_BOOLEAN,
        revision=_INTEGER,
        entries=_list_of(_or_null(_ref("EntryDocument"))),
    ),
    "StatusAnswer": _members(
        "What a namespace holds.",
        keys=_INTEGER,
        bytes=_INTEGER,
        revision=_INTEGER,
        log_changes=_INTEGER,
        log_bytes=_INTEGER,
        log_after=_INTEGER,
        store_id=_STRING,
        epoch=_INTEGER,
    ),
    "Envelope": _members("A semantic entry.", _IN_SOME_ENVELOPES, value=_OBJECT, **_ENVELOPE),
    "EnvelopePut": _members(
        "A semantic entry that was written, without its value.", _IN_SOME_ENVELOPES, replayed=_BOOLEAN, **_ENVELOPE
    ),
    "Envelopes": _members(
        "Some semantic entries, in order. When `truncated`, give `cursor` as `after` to go on.",
        entries=_list_of(_ref("Envelope")),
        truncated=_BOOLEAN,
        cursor=_or_null(_STRING),
    ),
    "EnvelopesPut": _members(
        "What a batch left: an envelope for each put, null for each delete.",
        entries=_list_of(_or_null(_ref("EnvelopePut"))),
    ),
    "Problem": _members(
        "What went wrong (RFC 9457).",
        ["retryable", "outcome"],
        type=_STRING,
        title=_STRING,
        status=_INTEGER,
        detail=_STRING,
        code=_STRING,
        retryable=_BOOLEAN,
        outcome={"enum": ["rejected", "unavailable", "unknown", "broken"]},
    ),
}


# Rules of the code that the types of members do not show.
_KEY: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": KEY_BYTES_MAX}
_TTL: Final[Schema] = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": TTL_S_MAX}
_BOUNDS: Final[dict[str, Schema]] = {
    "key": _KEY,
    "name": _KEY,
    "field": _KEY,
    "limit": {"type": "integer", "minimum": 1, "maximum": PAGE_MAX},
    "ttl": _TTL,
    # Base64 as plain text, without the ``contentEncoding`` that msgspec adds.
    "bytes": _STRING,
    "keys": {"type": "array", "items": _KEY, "maxItems": KEYS_MAX},
    "wait": {"type": "number", "minimum": 0, "maximum": WAIT_S_MAX},
}
_ONE_EXPECTATION: Final = [
    *({"required": [name]} for name in ("version", "revision", "absent", "value")),
    {"required": ["field", "equals"]},
]


# The document -----------------------------------------------------------------


def describe(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document of a table of routes."""
    shapes = {operation.request for operation in OPERATIONS.values()}
    shapes |= {one.body for one in endpoints if isinstance(one.body, type) and one.body is not Request}  # type: ignore[misc]
    _, components = msgspec.json.schema_components(sorted(shapes, key=lambda shape: shape.__name__), ref_template=_REF)
    # As JSON has it, where the default of a tuple is a list.
    components = msgspec.json.decode(msgspec.json.encode(components))
    for component in components.values():
        for name in component["properties"].keys() & _BOUNDS.keys():
            # The bounds in a shape itself are narrower.
            if not {"maximum", "maxLength"} & component["properties"][name].keys():
                component["properties"][name] = _BOUNDS[name]
    components["Expect"]["oneOf"] = _ONE_EXPECTATION
    paths: dict[str, Any] = {
        "/": {"get": _open_endpoint("index", "What this is.")},
        "/healthz": {"get": _open_endpoint("alive", "Whether the server is alive.")},
        "/readyz": {"get": _open_endpoint("ready", "Whether the server serves requests.", 503)},
    }
    paths["/v1/namespaces"] = {
        "get": {
            "operationId": "list_namespaces",
            "summary": "The namespaces that were written to, and in which the caller may read.",
            "responses": {"200": _response("OK", ReplyDoc("Namespaces")), **_problems(_COMMON)},
        }
    }
    for endpoint in endpoints:
        path = re.sub(r":\w+}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _endpoint(endpoint, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Limpet", "version": limpet.__version__, "description": inspect.getdoc(limpet)},
        "paths": paths,
        "security": [{"bearer": []}],
        "components": {
            "schemas": {**components, **_ANSWERS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {"Problem": _response("What went wrong.", ReplyDoc("Problem", [PROBLEM_TYPE]))},
        },
    }


def _open_endpoint(name: str, summary: str, *problems: int) -> dict[str, Any]:
    answers = {"200": _response("As it is.", ReplyDoc("Answer")), **_problems([400, 405, 421, *problems])}
    return {"operationId": name, "summary": summary, "security": [], "responses": answers}


def _endpoint(endpoint: Endpoint, components: Mapping[str, Schema]) -> dict[str, Any]:
    names = re.findall(r"{(\w+)", endpoint.path)
    answers = {str(status): _response(HTTPStatus(status).phrase, one) for status, one in endpoint.replies.items()}
    described = {
        "operationId": endpoint.name + ("_by_body" if _is_second_of_its_name(endpoint) else ""),
        "summary": SUMMARIES[endpoint.name],
        "parameters": [
            *(_path_parameter(name, KV_KEY if "/semantic/" in endpoint.path else _KEY) for name in names),
            *map(_parameter, endpoint.parameters),
        ],
        "responses": {**answers, **_problems(_COMMON)},
    }
    body = _body(endpoint, names, components)
    return described if body is None else {**described, "requestBody": body}


def _is_second_of_its_name(endpoint: Endpoint) -> bool:
    return endpoint.method == "POST" and endpoint.path.endswith("/scan")


def _path_parameter(name: str, schema: Schema) -> dict[str, Any]:
    if name == "namespace":
        schema = {"type": "string", "pattern": "^[a-z0-9_-]{1,100}$"}
    elif name == "operation":
        schema = {"type": "string", "enum": list(OPERATIONS)}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.text,
        "schema": dict(parameter.schema),
    }


def _response(text: str, reply: ReplyDoc) -> dict[str, Any]:
    response: dict[str, Any] = {"description": text}
    if reply.headers:
        response["headers"] = {name: {"schema": _STRING, "required": True} for name in reply.headers}
    if reply.schema is not None:
        response["content"] = {kind: {"schema": _ref(reply.schema)} for kind in reply.media_types}
    elif tuple(reply.media_types) != (JSON_TYPE,):
        response["content"] = {kind: {"schema": _VALUES.get(kind, _STRING)} for kind in reply.media_types}
    return response


def _problems(statuses: Iterable[int]) -> dict[str, Any]:
    return {str(status): {"$ref": "#/components/responses/Problem"} for status in statuses}


def _body(endpoint: Endpoint, names: Sequence[str], components: Mapping[str, Schema]) -> dict[str, Any] | None:
    if endpoint.body is None:
        return None
    if isinstance(endpoint.body, str):
        # A generated client sends one type. The first is described; reference/http.md names the others.
        kind = VALUE_TYPES[endpoint.body][0]
        return {"required": True, "content": {kind: {"schema": _VALUES[kind]}}}
    if endpoint.body is Request:
        shapes = {operation.request.__name__ for operation in OPERATIONS.values()}
        return {"content": {JSON_TYPE: {"schema": {"anyOf": [_ref(name) for name in sorted(shapes)]}}}}
    shape = components[endpoint.body.__name__]
    # What the path gives is not in the body.
    members = {name: member for name, member in shape["properties"].items() if name not in names}
    required = [name for name in shape["required"] if name not in names]
    schema = {**shape, "properties": members, "required": required}
    return {"required": bool(required), "content": {JSON_TYPE: {"schema": schema}}}
