"""The messages that a caller gets when an engine fails: plain sentences that hold no secret.

The message of an engine or a driver may quote a value, name a file, or hold the address of a database. So none of it
leaves the server: a caller gets a fixed text. The log gets the kinds of the errors, by `limpet.retry.reason_of`.
"""

from __future__ import annotations

from typing import Final

from limpet.errors import (
    Ambiguous,
    Closed,
    Compacted,
    Corrupt,
    InvalidValue,
    LimpetError,
    PermissionDenied,
    RateLimited,
    Unavailable,
)

__all__ = ["Public", "engine_error", "public_error", "public_message"]

# The text of an error that comes from an engine, by its kind. The messages of other kinds are made by `limpet.errors`,
# of keys and numbers.
_TEXTS: Final[dict[type[LimpetError], str]] = {
    Unavailable: "the store is unavailable; try again later",
    Corrupt: "the store holds something that cannot be read; its operator must look into it",
    Ambiguous: "it is not known whether the write was applied: request its outcome, or repeat it with its id",
    Closed: "the server is stopping; try again later",
    RateLimited: "the store accepts no more requests for now; try again later",
    PermissionDenied: "the store does not allow the server to do this; its operator must look into it",
    InvalidValue: "the database behind the store refuses this; its operator can see why in its log",
    Compacted: "cannot watch from there: the log does not hold this position. Start again with initial=True",
}
# Kinds whose message always comes from an engine, wherever they are raised.
_OF_ENGINES: Final = (Unavailable, Corrupt, Ambiguous, Closed)
_KEPT: Final = ("request_id", "since", "retry_after", "oldest", "path")


class Public(Exception):
    """An error whose message is the server's own and may be sent to any caller."""


def engine_error(error: LimpetError) -> LimpetError:
    """An error of an engine with a fixed message: of the same kind, with its numbers."""
    kind = next((kind for kind in _TEXTS if isinstance(error, kind)), None)
    if kind is None or isinstance(error, Public):
        return error
    return _reword(error, kind)


def public_error(error: Exception) -> Exception:
    """An error as a caller may see it. One of a kind that only engines raise gets a fixed message."""
    kind = next((kind for kind in _OF_ENGINES if isinstance(error, kind)), None)
    if kind is None or isinstance(error, Public) or not isinstance(error, LimpetError):
        return error
    return _reword(error, kind)


def public_message(error: Exception) -> str:
    """The message that a caller gets: that of `public_error`, or a fixed one for an error that is not ours."""
    return str(public_error(error)) if isinstance(error, LimpetError | Public) else "internal error"


def _reword(error: LimpetError, kind: type[LimpetError]) -> LimpetError:
    made = kind.__new__(kind, _TEXTS[kind])
    made.args = (_TEXTS[kind],)
    made.__dict__.update({name: item for name, item in vars(error).items() if name in _KEPT})
    if kind is InvalidValue:
        made.__dict__["path"] = None
    return made
