"""How much a request writes, key by key: for the quotas, and for the log.

An addition is the most that a request may put under a key. What it replaces there is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import UNSET, UnsetType

from limpet import codec
from limpet.append import make_key
from limpet.model import Add, Batch, Create, Patch, Put
from limpet.protocol.json import field_of
from limpet.server import requests
from limpet.server.requests import Request

__all__ = ["Addition", "additions_of"]


class Addition(NamedTuple):
    """The bytes that a request puts under a key, in place of the whole value or of certain fields."""

    size_bytes: int
    fields: Sequence[str] | None = None


_COUNTER: Final = Addition(20)


def additions_of(request: Request, *, with_sizes: bool = True) -> dict[str, Addition]:
    """The additions of a request by their keys. Empty for one that only reads, deletes or touches."""
    match request:
        case requests.Set() | requests.Cas():
            return {request.key: _measure_value(request.value, with_sizes)}
        case requests.Put():
            return {request.key: _measure_write(request, with_sizes)}
        case requests.Incr():
            return {request.key: _COUNTER}
        case requests.Append():
            # A key that no append makes stands for the one that this will make.
            return {make_key(request.prefix, 0): _measure_write(request, with_sizes)}
        case requests.FieldsOf():
            fields = {} if isinstance(request.set, UnsetType) else request.set
            if not isinstance(request.swap, UnsetType):
                fields = {request.swap.field: request.swap.new}
            return {request.key: _measure_fields(fields, with_sizes)} if fields else {}
        case requests.Batch():
            return {write.key: _measure_write(write, with_sizes) for write in request.writes if write.op in _ADDING}
        case requests.KvPut():
            return {request.key: _measure_value(request.value, with_sizes)}
        case requests.KvBatch():
            return {
                item.key: _measure_value(item.value, with_sizes)
                for item in request.items
                if isinstance(item, requests.KvItemPut)
            }
        case requests.Primitive(what=Batch() as batch):
            return {
                write.key: _measure_primitive(write)
                for write in batch.writes
                if isinstance(write, Put | Create | Add | Patch) and write.family == "data"
            }
        case _:
            return {}


def _measure_primitive(write: Put | Create | Add | Patch) -> Addition:
    match write:
        case Put() | Create():
            return Addition(codec.size_bytes(write.stored))
        case Patch():
            return Addition(codec.size_bytes(write.fields), tuple(write.fields))
        case Add():
            return _COUNTER


_ADDING: Final = frozenset({"put", "create", "add", "set"})


def _measure_write(request: requests.Put | requests.Append | requests.BatchWrite, with_sizes: bool) -> Addition:
    op = request.op if isinstance(request, requests.BatchWrite) else "put"
    if op == "add":
        return _COUNTER
    if not isinstance(request.fields, UnsetType):
        addition = _measure_fields(request.fields, with_sizes)
        return addition if op == "set" else Addition(addition.size_bytes)
    if not isinstance(request.bytes, UnsetType):
        return Addition(len(request.bytes))
    return _measure_value(None if request.value is UNSET else request.value, with_sizes)


def _measure_value(value: Any, with_sizes: bool) -> Addition:
    return Addition(codec.size_bytes(codec.encode(value)) if with_sizes else 0)


def _measure_fields(fields: Mapping[str, Any], with_sizes: bool) -> Addition:
    encoded = codec.encode(codec.Fields({name: field_of(item) for name, item in fields.items()})) if with_sizes else {}
    return Addition(codec.size_bytes(encoded), tuple(fields))
