"""What went wrong, in the words of the command line, and how it exits.

The library speaks to a programmer: use ``initial=True``, call ``update``. Here the same errors
speak to somebody at a prompt. A message says what happened to which key, what was expected and
what was found; the advice says what to do next. Neither holds a value, which may be a secret.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from limpet import errors
from limpet.protocol.codes import code_of

PIPE_CLOSED: Final = 141
"""What a shell says of a program whose reader left: 128 and the number of SIGPIPE."""

_ADVICE: Final[dict[type[errors.LimpetError], str]] = {
    errors.InvalidKey: "A key is 1 to 1,024 bytes of UTF-8 without U+0000.",
    errors.InvalidTTL: "Write a duration above zero, such as 30s, 5m or 1h30m.",
    errors.TypeMismatch: "'limpet get --json KEY' shows its kind; incr needs an integer, field a record.",
    errors.Conflict: "Nothing was changed. Look at it with 'limpet get --json KEY', decide, and try again.",
    errors.NotFound: "'limpet ls' lists the keys there; -n chooses another namespace.",
    errors.LockHeld: "COMMAND was not run. Try again later, or wait for the lock with --wait.",
    errors.LockLost: "Stop: somebody else may hold it now. Writes with --fenced are refused.",
    errors.Compacted: "Start again with --initial.",
    errors.TransientError: "Nothing was changed. Try again; if it stays so, 'limpet doctor' looks closer.",
    errors.Ambiguous: "It may have been written, once. Repeat it under the same --request-id, or look first.",
    errors.Corrupt: "'limpet doctor' looks closer.",
}
_SHOWN_MAX: Final = 120


class Missing(errors.NotFound):
    """Something that was asked for and is not there, told in a command's own words."""

    def __init__(self, text: str, advice: str, *, key: str | None = None) -> None:
        super().__init__(key or "")
        self.args = (text,)
        self.advice = advice
        if key is None:
            del self.key


def shown(name: str) -> str:
    """A key as it stands in a message: quoted, escaped, and never longer than a line."""
    text = repr(name)
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 4]}...'"


def exit_code(error: errors.LimpetError) -> int:
    """How the process ends after this error."""
    return code_of(error).exit


class Told(NamedTuple):
    """An error in words."""

    message: str
    advice: str | None


def told(error: errors.LimpetError, place: str) -> Told:
    """An error in the words of the command line."""
    text = str(error)
    advice = next((advice for kind, advice in _ADVICE.items() if isinstance(error, kind)), None)
    match error:
        case Missing():
            return Told(text, error.advice)
        case errors.NotFound():
            return Told(f"{text} in {place}", advice)
        case errors.Conflict(code="version_conflict"):
            return Told(text, "Nothing was changed. Look at what is there, decide, and try again.")
        case errors.Conflict(reason="stale_request"):
            message = f"request id {shown(error.key)} was used before for another request"
            return Told(message, "Nothing was changed. Give a new request a new --request-id.")
        case errors.Conflict(current=None):
            return Told(f"conflict on {shown(error.key)}: expected {error.expected}, found no such key", advice)
        case errors.Conflict():
            found = f"found version {error.actual_version} at revision {error.actual_revision}"
            return Told(f"conflict on {shown(error.key)}: expected {error.expected}, {found}", advice)
        case errors.Contention():
            return Told(f"{shown(error.key)} changed under {error.attempts} attempts in a row", advice)
        case errors.Compacted():
            return Told(text.removesuffix(". Start again with initial=True"), advice)
        case errors.InvalidTTL():
            return Told(text.partition(";")[0], advice)
        case errors.LockLost():
            return Told(text.removesuffix(", stop writing"), advice)
        case _:
            return Told(text, advice)


def as_json(error: errors.LimpetError, place: str) -> dict[str, Any]:
    """An error as a JSON document. The entry that was found is left out: it holds a value."""
    message, advice = told(error, place)
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
