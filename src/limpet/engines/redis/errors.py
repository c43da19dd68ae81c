"""Errors of the Redis driver and server, and which of ours they become."""

from __future__ import annotations

import re
from typing import Final

from redis import exceptions

from limpet.errors import Corrupt, InvalidValue, LimpetError, PermissionDenied, TypeMismatch, Unavailable
from limpet.urls import Address

__all__ = [
    "Superseded",
    "bad_url_error",
    "foreign_key_error",
    "is_connection_lost",
    "translate_error",
    "translate_message",
]


class Superseded(Exception):
    """A batch of a group arrived after its own retry; nothing of the group was applied."""


def bad_url_error(address: Address) -> InvalidValue:
    """Make the error of a URL that the driver refuses."""
    return InvalidValue(f"{address}: the driver cannot use this URL; check its host, port and path")


def is_connection_lost(error: BaseException) -> bool:
    """Whether a request may or may not have been applied, because the connection broke or the reply did not come."""
    if isinstance(error, exceptions.ResponseError | exceptions.ReadOnlyError | exceptions.BusyLoadingError):
        return False
    return isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError | TimeoutError)


def translate_error(name: str, error: Exception) -> Exception:
    """Our error for an error of the driver; an error that is not the driver's stays as it is."""
    match error:
        case exceptions.AuthenticationError() | exceptions.NoPermissionError():
            return PermissionDenied(f"{name}: {error}")
        case exceptions.AskError():
            return Unavailable(f"{name}: the namespace has moved to another server of the cluster")
        case exceptions.ReadOnlyError() | exceptions.BusyLoadingError() | exceptions.OutOfMemoryError():
            return Unavailable(f"{name}: {error}")
        case exceptions.ResponseError():
            message = str(error)
            # It stays the cause of our error, and a log prints causes.
            error.args = (_without_arguments(message),)
            return translate_message(name, message)
        case exceptions.RedisError() | OSError() | TimeoutError():
            return Unavailable(f"{name} cannot be reached now: {type(error).__name__}")
        case _:
            return error


_FORBIDDEN: Final = re.compile(r"\b(NOPERM|NOAUTH|WRONGPASS)\b|ACL failure|The user executing the script can't")
_PASSING: Final = re.compile(
    r"\b(LOADING|BUSY|CLUSTERDOWN|MASTERDOWN|TRYAGAIN|NOREPLICAS|OOM|MISCONF|READONLY|NOSCRIPT|MOVED|ASK|UNKILLABLE)\b"
)
# One of our keys has another type, or holds something that the script cannot read.
_FOREIGN: Final = re.compile(r"\bWRONGTYPE\b|user_script|Error running script")


def translate_message(name: str, message: str) -> LimpetError:
    """Our error for an error message of the server, found by the words in it that do not vary.

    A script passes on the errors of its commands. An unknown message becomes Unavailable, and so does a command that
    an operator has disabled.
    """
    text = f"{name}: {_without_arguments(message)}"
    if _FORBIDDEN.search(message):
        return PermissionDenied(text)
    return Corrupt(text) if _FOREIGN.search(message) and not _PASSING.search(message) else Unavailable(text)


def _without_arguments(message: str) -> str:
    """An error message without the arguments of a command that the server does not know: they may be values."""
    return message.partition(", with args")[0]


def foreign_key_error(redis_key: str, redis_type: str, key: str) -> TypeMismatch:
    """Make the error of a first write to a key whose Redis key another program has written."""
    return TypeMismatch(
        key,
        expected="that key to be free: move it away, use another namespace, or let 'limpet adopt' take it over",
        found=f"a Redis key that Limpet did not write ({redis_type} {redis_key!r})",
    )
