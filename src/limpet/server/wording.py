"""What the server says to a caller when something fails: the code, and plain words that hold no secret.

What an engine or a driver says may quote a value, name a file, or hold the address of a database. So none of it leaves
the server: a caller gets a fixed text. The log gets the kinds of the errors, by `limpet.retry.reason_of`.
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

# The text of an error that comes from an engine, by its kind. Other kinds are worded by `limpet.errors` itself, from
# keys and numbers.
_TEXTS: Final[dict[type[LimpetError], str]] = {
    Unavailable: "the store is unavailable; try again later",
    Corrupt: "the store holds something that cannot be read; its operator must look into it",
    Ambiguous: "the store did not say whether the write was applied: ask for its outcome, or repeat it with its id",
    Closed: "the server is stopping; try again later",
    RateLimited: "the store takes no more for now; try again later",
    PermissionDenied: "the store does not allow the server to do this; its operator must look into it",
    InvalidValue: "the database behind the store refuses this; its operator can tell why",
    Compacted: "cannot watch from there: the log does not hold this position. Start again with initial=True",
}
# Kinds that say nothing but what an engine says, wherever they were raised.
_OF_ENGINES: Final = (Unavailable, Corrupt, Ambiguous, Closed)
_KEPT: Final = ("request_id", "since", "retry_after", "oldest", "path")


class Public(Exception):
    """An error whose words are the server's own and may be shown to any caller."""


def engine_error(error: LimpetError) -> LimpetError:
    """An error of an engine in plain words: of the same kind, with its numbers and without its message."""
    kind = next((kind for kind in _TEXTS if isinstance(error, kind)), None)
    if kind is None or isinstance(error, Public):
        return error
    return _worded(error, kind)


def public_error(error: Exception) -> Exception:
    """An error as a caller may see it. One of a kind that only engines raise is put in plain words."""
    kind = next((kind for kind in _OF_ENGINES if isinstance(error, kind)), None)
    if kind is None or isinstance(error, Public) or not isinstance(error, LimpetError):
        return error
    return _worded(error, kind)


def public_message(error: Exception) -> str:
    """What a caller is told: the words of `public_error`, and of an error that is not ours nothing."""
    return str(public_error(error)) if isinstance(error, LimpetError | Public) else "internal error"


def _worded(error: LimpetError, kind: type[LimpetError]) -> LimpetError:
    made = kind.__new__(kind, _TEXTS[kind])
    made.args = (_TEXTS[kind],)
    made.__dict__.update({name: item for name, item in vars(error).items() if name in _KEPT})
    if kind is InvalidValue:
        made.__dict__["path"] = None
    return made
