"""Superseded requests: a first attempt that arrives after its own retry was answered does nothing."""

from __future__ import annotations

from typing import Final

from limpet.errors import Unavailable
from limpet.model import Batch

__all__ = ["SUPERSEDED_MS", "may_be_superseded", "superseded_error"]

SUPERSEDED_MS: Final = 3_600_000
"""How long it is known which requests were superseded by their own retry."""


def superseded_error() -> Unavailable:
    """What a first attempt is told that arrives after its retry, when nobody waits for it any more."""
    return Unavailable("this request was superseded by its own retry")


def may_be_superseded(batch: Batch) -> bool:
    """Whether a batch is a first attempt that somebody else may have asked for again meanwhile.

    That is one which its sender has named. What leaves a receipt is known by that.
    """
    return batch.request_id is not None and batch.receipt_ms is None and batch.retry_since is None
