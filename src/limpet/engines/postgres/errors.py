"""What an error of PostgreSQL or of its driver means, as an error of Limpet, without any stored value in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import asyncpg

from limpet.errors import Corrupt, InvalidValue, LimpetError, PermissionDenied, Unavailable

__all__ = ["DRIVER_ERRORS", "is_about_one_row", "is_connection_lost", "translate_error"]

DRIVER_ERRORS: Final = (LimpetError, OSError, asyncpg.InterfaceError, asyncpg.InternalClientError)

# By SQLSTATE, or by its class. Any other state passes, or an operator can repair it: a missing table, a full disk, a
# server that stops. Only damaged data, or a foreign object with the name of one of our tables, is Corrupt.
_STATES: Final[dict[str, Callable[[str], LimpetError]]] = {
    "42501": PermissionDenied,
    "28": PermissionDenied,
    "3D": InvalidValue,
    "42602": InvalidValue,
    "42939": InvalidValue,
    # Constraints and triggers of the database that are not ours. A unique key may be a race.
    "23": InvalidValue,
    "23505": Unavailable,
    "44": InvalidValue,
    "P0": InvalidValue,
    # The encoding of the database lacks a character.
    "22021": InvalidValue,
    "22P05": InvalidValue,
    "22": Corrupt,
    "XX001": Corrupt,
    "XX002": Corrupt,
    "42701": Corrupt,
    "42710": Corrupt,
    "42723": Corrupt,
    "42P06": Corrupt,
    "42P07": Corrupt,
}
# The row cannot be encoded, or breaks a constraint, a trigger or a policy of the database.
_ABOUT_ONE_ROW: Final = frozenset({"22", "23", "P0", "44"})
# Classes whose messages name objects of the database, the server or the connection, and never a value.
_SAFE_MESSAGES: Final = frozenset({"08", "0A", "25", "28", "3D", "3F", "40", "42", "53", "54", "55", "57", "58"})


def is_connection_lost(error: BaseException) -> bool:
    """Whether the connection broke, so that the effect of the last statement is unknown."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "")[:2] == "08" or (error.sqlstate or "")[:3] == "57P"
    return isinstance(error, OSError | TimeoutError | asyncpg.InterfaceError | asyncpg.InternalClientError)


def is_about_one_row(error: asyncpg.PostgresError) -> bool:
    """Whether the server refused a single row, so that the other batches of a group may succeed without it."""
    return (error.sqlstate or "")[:2] in _ABOUT_ONE_ROW


def translate_error(error: Exception, display_name: str) -> Exception:
    """A driver's error as ours, for a statement that was not applied or that may be run again."""
    if isinstance(error, LimpetError):
        return error
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        made = _STATES.get(state) or _STATES.get(state[:2]) or Unavailable
        return made(f"{display_name}: {_remove_values(error)}")
    # An error of TLS may be a ValueError too.
    if isinstance(error, OSError):
        return Unavailable(f"{display_name} cannot be reached now: {type(error).__name__}")
    if isinstance(error, ValueError | OverflowError):
        # Not the driver's own text: it may have read a part of a password as a port.
        return InvalidValue(f"{display_name}: the driver cannot use this URL, check its host, port and options")
    if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError):
        return Unavailable(f"{display_name} cannot be reached now: {type(error).__name__}")
    return error


def _remove_values(error: asyncpg.PostgresError) -> str:
    """Remove from a server's error everything that may hold a value, and return the message that is left.

    Its details show whole rows, and its message may be the text of a trigger, which may contain anything. The driver's
    error stays the cause of ours, so that a logged traceback prints it.
    """
    state = error.sqlstate or ""
    # The source files of procedural languages are named pl_*.c: then code in the database chose the text.
    is_raised = (error.server_source_filename or "").startswith("pl")
    if state[:2] in _SAFE_MESSAGES and not is_raised:
        text = str(error.message)
    else:
        text = f"the server refuses it, SQLSTATE {state} ({type(error).__name__})"
        if error.constraint_name and not is_raised:
            text += f", by the constraint {error.constraint_name}"
    error.args = (text,)
    error.message = text
    error.detail = error.hint = error.context = error.internal_query = None
    return text
