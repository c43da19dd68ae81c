"""Errors in words that a model can act on: what was not done, what is there now, and what to do next.

A conflict is explained the most: which members others have changed, and, where the caller may see values, what they
hold now. Values that are too long are left out.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET

from limpet.errors import (
    Ambiguous,
    Compacted,
    Conflict,
    Contention,
    InvalidKey,
    InvalidTTL,
    InvalidValue,
    LimpetError,
    LockExpired,
    LockHeld,
    LockLost,
    LockNotHeld,
    NotFound,
    PermissionDenied,
    RateLimited,
    Unavailable,
    ValueTooLarge,
)
from limpet.keys import key_span
from limpet.mcp import values
from limpet.mcp.workspace import DIFFERENCES, Differences, Workspace
from limpet.merge import Clash
from limpet.model import ABSENT
from limpet.protocol.json import plain
from limpet.server.wording import public_error

__all__ = ["Problem", "describe"]

SHOWN_CHARS_MAX: Final = 2_000
PATHS_MAX: Final = 20

_NEXT: Final[dict[type[LimpetError], str]] = {
    LockHeld: "Wait and call lock again (it can wait for you), or do something else meanwhile.",
    LockLost: "Nothing was written. Others may have written since: take the lock again, read again, then decide.",
    LockExpired: "Take the lock again, and read again what it protects, before you go on.",
    LockNotHeld: "Take the lock first, and pass the token that lock returned.",
    NotFound: "Look with list which keys there are.",
    PermissionDenied: "Trying again will not help. Tell the person you work for which right is missing.",
    Unavailable: "Wait a few seconds and call it again.",
    RateLimited: "Wait and call it again.",
    Contention: "Nothing was written. Wait a second and call it again.",
    Ambiguous: "It may have been written or not: read the key before you write again.",
    Compacted: "Read what you need again, and wait from the revision that is there now.",
    InvalidKey: "Use another key: 1 to 1,024 bytes of text, such as 'plan' or 'task/7'.",
    InvalidTTL: "Give seconds above zero, or leave it out for no end.",
    InvalidValue: "Correct the arguments and call it again.",
    ValueTooLarge: "Store it in several keys, or store where it can be found.",
}


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as structured content.

    Attributes:
        error: Its stable code.
        message: What happened.
        next: What to do.
        revision: Of a conflict, the revision of what is there now; 0 if nothing is.
        changed: The paths that others have changed since the revision that the caller gave.
        now: What is there now, if it is short and may be seen.
        clashes: Of an edit, the members that others have changed too.
    """

    error: str
    message: str
    next: str
    revision: int | None = None
    changed: list[str] | None = None
    now: Any = UNSET
    clashes: list[dict[str, Any]] | None = None

    def text(self) -> str:
        """The whole as one text."""
        return f"{self.message}\nNext: {self.next}"


async def describe(space: Workspace, tool: str, error: Exception, arguments: Any) -> Problem:
    """Put an error of a tool into words."""
    error = public_error(error)
    if isinstance(error, Conflict):
        return await _describe_conflict(space, tool, error, getattr(arguments, "revision", None))
    if not isinstance(error, LimpetError):
        return Problem("internal", f"{tool} failed by a mistake of the server.", "Tell the person you work for.")
    what = next((text for kind, text in _NEXT.items() if isinstance(error, kind)), "Correct it and call it again.")
    return Problem(error.code, f"{tool}: {str(error).rstrip('.')}.", what)


async def _describe_conflict(space: Workspace, tool: str, error: Conflict, given: int | None) -> Problem:
    found: dict[str, Any] = {"entry": error.current, "paths": None}
    may_see = space.may_see(key_span(error.key))
    if error.clashes and may_see:
        # With the revision at which they clashed. A later one would let the next edit replace what was not shown.
        return _describe_clashes(error, given)
    if may_see and given is not None:
        try:
            found = await space.run(DIFFERENCES, Differences(key=error.key, revision=given))
        except LimpetError:
            # The conflict itself is certain. That it cannot be explained now must not hide it.
            may_see = False
    entry = found["entry"]
    revision = 0 if entry is None else entry.revision
    message = _state(error.key, revision, given)
    paths: list[str] | None = found["paths"]
    changed = None if paths is None else paths[:PATHS_MAX]
    if paths:
        message += f" Others have changed since: {_listed(paths)}."
    now = plain(entry.value) if may_see and entry is not None else UNSET
    if now is UNSET or values.size_of(now) > SHOWN_CHARS_MAX:
        return Problem("conflict", message, _next_of(tool, error.key, revision, is_shown=False), revision, changed)
    message += f" It holds now: {_json(now)}"
    return Problem("conflict", message, _next_of(tool, error.key, revision, is_shown=True), revision, changed, now)


def _state(key: str, revision: int, given: int | None) -> str:
    nothing = "Conflict: nothing was written."
    if not revision:
        return f"{nothing} {key!r} is not there (any more), and you gave revision {given}."
    if not given:
        return f"{nothing} {key!r} is there already, at revision {revision}."
    return f"{nothing} {key!r} is at revision {revision} now, and you gave revision {given}."


def _next_of(tool: str, key: str, revision: int, *, is_shown: bool) -> str:
    """What to do. A revision is named only with what it holds: a model must not replace what it has not seen."""
    if not revision:
        return f"Someone has deleted it, or it has expired. To make it again, call {tool} with revision 0."
    if not is_shown:
        return f"Call get for {key!r}, decide again, and call {tool} with the revision that it returns."
    if tool == "put":
        return (
            f"Put your change into what is there now, and call put with revision {revision}. "
            "Or call edit, which changes only the members that you name and keeps what others wrote."
        )
    return f"Decide by what is there now, and call {tool} with revision {revision}."


def _describe_clashes(error: Conflict, given: int | None) -> Problem:
    """An edit and another writer have changed the same members."""
    revision = error.actual_revision or 0
    clashes = [_clash(clash) for clash in error.clashes[:PATHS_MAX]]
    more = len(error.clashes) - len(clashes)
    shown = "; ".join(
        f"{clash['path'] or 'the whole value'} (was {_text(clash, 'was')}, is {_text(clash, 'now')} now, "
        f"you wanted {_text(clash, 'yours')})"
        for clash in clashes
    ) + (f"; and {more} more" if more else "")
    is_shown = not more and all("now" in clash or "now" in clash["absent"] for clash in clashes)
    first = "Decide for each of them." if is_shown else "Read them by get, and decide for each of them."
    which = f"revision {revision}" if is_shown else "the revision that get returns"
    following = (
        f"{first} To keep what is there now, leave it out of your edit; to replace it, name it again. "
        f"Then call edit with {which}. Your other changes were not written either: send them again."
    )
    message = f"{_state(error.key, revision, given)} You and another writer have changed the same members: {shown}."
    return Problem("conflict", message, following, revision, [each["path"] for each in clashes], clashes=clashes)


def _clash(clash: Clash) -> dict[str, Any]:
    """A clash as JSON. A part that is absent, or too long, is left out."""
    parts = {"was": clash.base, "now": clash.theirs, "yours": clash.mine}
    shown = {name: plain(part) for name, part in parts.items() if part is not ABSENT and _is_short(part)}
    return {"path": values.pointer(clash.path), **shown, "absent": [n for n, part in parts.items() if part is ABSENT]}


def _is_short(value: Any) -> bool:
    return values.size_of(value) <= SHOWN_CHARS_MAX // 4


def _text(clash: dict[str, Any], name: str) -> str:
    if name in clash["absent"]:
        return "absent"
    return _json(clash[name]) if name in clash else "too long to show"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _listed(paths: list[str]) -> str:
    shown = ", ".join(path or "the whole value" for path in paths[:PATHS_MAX])
    return f"{shown} and {len(paths) - PATHS_MAX} more" if len(paths) > PATHS_MAX else shown
