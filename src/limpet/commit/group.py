"""Batches that are committed together: one that cannot be committed fails no other."""

from __future__ import annotations

from typing import Final, get_args

from limpet.errors import InvalidValue, LimpetError
from limpet.model import Batch, Guard, Write

__all__ = ["NotApplied", "commit_error", "is_fault_of_one"]


class NotApplied(Exception):
    """Nothing of a group of batches was applied, and one of them may be the reason: each is committed by itself.

    Attributes:
        meaning: What a batch that is committed by itself fails with.
    """

    def __init__(self, meaning: Exception) -> None:
        super().__init__(type(meaning).__name__)
        self.meaning = meaning


def is_fault_of_one(error: Exception) -> bool:
    """Whether the error of a group of which nothing was applied may be the fault of one batch in it.

    An error of ours concerns all of them: the place cannot be reached, is closed, or refuses the caller.
    """
    return not isinstance(error, LimpetError)


def commit_error(batch: Batch, error: Exception) -> LimpetError:
    """What the caller of a batch is told that was tried by itself and could not be committed.

    No draft makes a batch that an engine cannot encode, so that this is a batch made by hand or a mistake of ours. An
    error of ours in any case, so that whoever commits in the background handles it like others.
    """
    meaning = error.meaning if isinstance(error, NotApplied) else error
    if isinstance(meaning, LimpetError):
        meaning.__cause__ = meaning.__cause__ or error.__cause__
        return meaning
    named = [one.key for one in (*batch.writes, *batch.guards) if isinstance(one, _NAMING)]
    about = f"the batch on {named[0]!r}" if named else "the batch"
    made = InvalidValue(f"{about} cannot be committed and nothing changed: {type(meaning).__name__}")
    made.__cause__ = meaning
    return made


_NAMING: Final = (*get_args(Write), Guard)
