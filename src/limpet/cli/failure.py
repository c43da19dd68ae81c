"""Errors as messages of the command line, and their exit codes.

The messages of the library are for a programmer: use ``initial=True``, call ``update``. Here the same errors are worded
for a person at a prompt. A message names the key, what was expected and what was found; the advice names what to do
next. Neither holds a value, which may be a secret.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from limpet import errors
from limpet.moving.loader import OtherEntry
from limpet.protocol.codes import code_of

PIPE_CLOSED: Final = 141
"""The exit code when the reader of a pipe has left: 128 and the number of SIGPIPE."""

_ADVICE: Final[dict[type[errors.LimpetError], str]] = {
    errors.InvalidKey: "A key is 1 to 1,024 bytes of UTF-8 without U+0000.",
    errors.InvalidTTL: "Write a duration above zero, such as 30s, 5m or 1h30m.",
    errors.TypeMismatch: "'limpet get --json KEY' shows its kind; incr needs an integer, field a record.",
    errors.Conflict: "Nothing was changed. Read it with 'limpet get --json KEY', decide, and try again.",
    errors.NotFound: "'limpet ls' lists the keys; -n chooses another namespace.",
    errors.LockHeld: "COMMAND was not run. Try again later, or wait for the lock with --wait.",
    errors.LockLost: "Stop: another process may hold it now. Writes with --fenced are refused.",
    errors.Compacted: "Start again with --initial.",
    errors.TransientError: "Nothing was changed. Try again; if it fails again, run 'limpet doctor'.",
    errors.Ambiguous: "It may have been written, once. Repeat it with the same --request-id, or read the key first.",
    errors.Corrupt: "Run 'limpet doctor' for details.",
}
_SHOWN_MAX: Final = 120


class Missing(errors.NotFound):
    """Something that a command needs is absent. The command gives the message and the advice."""

    def __init__(self, text: str, advice: str, *, key: str | None = None) -> None:
        super().__init__(key or "")
        self.args = (text,)
        self.advice = advice
        if key is None:
            del self.key


def quote_name(name: str) -> str:
    """A key for a message: quoted, escaped, and cut to the length of a line."""
    text = repr(name)
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 4]}...'"


def exit_code(error: errors.LimpetError) -> int:
    """The exit code of the process after this error."""
    return code_of(error).exit


class ErrorText(NamedTuple):
    """The message of an error, and what to do next."""

    message: str
    advice: str | None


def describe(error: errors.LimpetError, place: str) -> ErrorText:
    """The text of an error. ``place`` names the namespace and the store."""
    text = str(error)
    advice = next((advice for kind, advice in _ADVICE.items() if isinstance(error, kind)), None)
    match error:
        case Missing() | OtherEntry():
            return ErrorText(text, error.advice)
        case errors.NotFound():
            return ErrorText(f"{text} in {place}", advice)
        case errors.Conflict(code="version_conflict"):
            return ErrorText(text, "Nothing was changed. Read the entry, decide, and try again.")
        case errors.Conflict(reason="stale_request"):
            message = f"request id {quote_name(error.key)} was used before for another request"
            return ErrorText(message, "Nothing was changed. Give a new request a new --request-id.")
        case errors.Conflict(current=None):
            return ErrorText(
                f"conflict on {quote_name(error.key)}: expected {error.expected}, found no such key", advice
            )
        case errors.Conflict():
            found = f"found version {error.actual_version} at revision {error.actual_revision}"
            return ErrorText(f"conflict on {quote_name(error.key)}: expected {error.expected}, {found}", advice)
        case errors.Contention():
            return ErrorText(f"{quote_name(error.key)} changed under {error.attempts} attempts in a row", advice)
        case errors.Compacted():
            return ErrorText(text.removesuffix(". Start again with initial=True"), advice)
        case errors.InvalidTTL():
            return ErrorText(text.partition(";")[0], advice)
        case errors.LockLost():
            return ErrorText(text.removesuffix(", stop writing"), advice)
        case _:
            return ErrorText(text, advice)


def as_json(error: errors.LimpetError, place: str) -> dict[str, Any]:
    """An error as a JSON document. The entry that was found is left out: it holds a value."""
    message, advice = describe(error, place)
    return {
        "error": error.code,
        "message": message,
        "advice": advice,
        "exit_code": exit_code(error),
        "retryable": error.retryable,
        "outcome": error.outcome,
        "details": {
            name: detail
            for name, detail in vars(error).items()
            if name not in ("advice", "current") and isinstance(detail, str | int | float | None)
        },
    }
