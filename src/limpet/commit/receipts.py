"""Superseded requests: a first attempt that arrives after its own retry was answered does nothing."""

from __future__ import annotations

from typing import Final

from limpet.errors import Unavailable
from limpet.model import Batch

__all__ = ["SUPERSEDED_MS", "may_be_superseded", "superseded_error"]

SUPERSEDED_MS: Final = 3_600_000
"""How long an engine remembers which requests were superseded by their own retry."""


def superseded_error() -> Unavailable:
    """Make the error of a superseded request. Usually no caller waits for it any more."""
    return Unavailable("this request was superseded by its own retry")


def may_be_superseded(batch: Batch) -> bool:
    """Whether a batch is a first attempt whose retry may already have run, perhaps through another process.

    Only a batch with a request id can be retried by another process. A batch with a receipt is recognised by its
    receipt instead.
    """
    return batch.request_id is not None and batch.receipt_ms is None and batch.retry_since is None
