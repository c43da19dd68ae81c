"""Values of other programs as stored values: JSON text, pickles without objects, and times."""

from __future__ import annotations

import io
import json
import math
import pickle
from datetime import UTC, datetime
from typing import Any

from limpet import codec
from limpet.codec import Stored
from limpet.errors import InvalidValue
from limpet.model import Import
from limpet.moving.entries import Brought, Rejected

__all__ = ["as_item", "from_json", "plain_pickle", "time_ms"]


def from_json(text: str | bytes) -> Stored:
    """A JSON text as a stored value. Integers stay exact, or are refused."""
    try:
        # The decoder of the standard library: others turn large integers into floats.
        return codec.encode(json.loads(text, parse_constant=_refuse_constant))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue("the value is not JSON") from error
    except RecursionError:
        raise InvalidValue("the value is nested too deep") from None


def _refuse_constant(name: str) -> Any:
    raise InvalidValue(f"the value holds {name}, which is not JSON")


class _Unpickler(pickle.Unpickler):
    """Loads plain values. A pickle of anything else would run code of its author."""

    def find_class(self, module: str, name: str) -> Any:
        raise InvalidValue(f"the value is an object of {module}.{name}, and only plain values are adopted")


def plain_pickle(pickled: bytes) -> Any:
    """The value of a pickle that holds dicts, lists, strings, bytes, numbers and nothing else."""
    try:
        return _Unpickler(io.BytesIO(pickled)).load()
    except InvalidValue:
        raise
    except Exception as error:
        raise InvalidValue("the value is a pickle that cannot be read") from error


def as_item(namespace: str, key: Any, make: Any, *, is_exact: bool = False, **members: Any) -> Brought | Rejected:
    """An entry of this value, or why it cannot be one. ``make`` returns the stored value or raises."""
    if not isinstance(key, str):
        return Rejected(namespace, repr(key), f"a key is a str, not of type {type(key).__name__}")
    try:
        return Brought(namespace, Import(key, make(), **members), is_exact)
    except InvalidValue as error:
        return Rejected(namespace, key, str(error))


def time_ms(found: Any, *, up: bool = False) -> int:
    """A time of a database as milliseconds; ``up`` rounds up, so that nothing ends early."""
    if isinstance(found, str):
        try:
            at = datetime.fromisoformat(found)
        except ValueError:
            raise InvalidValue("a time of the row cannot be read") from None
        found = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if isinstance(found, datetime):
        found = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    ms = round(float(found) * 1000, 3)
    return math.ceil(ms) if up else math.floor(ms)
