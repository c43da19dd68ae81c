"""Batches that are committed together: one that fails does not fail another."""

from __future__ import annotations

from typing import Final, get_args

from limpet.errors import InvalidValue, LimpetError
from limpet.model import Batch, Guard, Write

__all__ = ["NotApplied", "commit_error", "is_fault_of_one"]


class NotApplied(Exception):
    """Nothing of a group of batches was applied, and one of them may be the reason: commit each by itself.

    Attributes:
        meaning: The error of a batch that fails also when it is committed by itself.
    """

    def __init__(self, meaning: Exception) -> None:
        super().__init__(type(meaning).__name__)
        self.meaning = meaning


def is_fault_of_one(error: Exception) -> bool:
    """Whether the error of a group, of which nothing was applied, may be the fault of one batch in it.

    A `LimpetError` concerns all of them: the engine cannot be reached, is closed, or refuses the caller.
    """
    return not isinstance(error, LimpetError)


def commit_error(batch: Batch, error: Exception) -> LimpetError:
    """Make the error for the caller of a batch that failed also when it was committed by itself.

    A draft never makes a batch that an engine cannot encode, so the batch was made by hand, or Limpet has a bug. It is
    a `LimpetError` in any case, so that background work handles it like any other.
    """
    meaning = error.meaning if isinstance(error, NotApplied) else error
    if isinstance(meaning, LimpetError):
        meaning.__cause__ = meaning.__cause__ or error.__cause__
        return meaning
    named = [one.key for one in (*batch.writes, *batch.guards) if isinstance(one, _KEYED)]
    about = f"the batch on {named[0]!r}" if named else "the batch"
    made = InvalidValue(f"{about} cannot be committed and nothing changed: {type(meaning).__name__}")
    made.__cause__ = meaning
    return made


_KEYED: Final = (*get_args(Write), Guard)
