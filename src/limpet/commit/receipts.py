"""Requests that are sent twice: what a retry finds of its first attempt, and a first attempt that arrives too late.

A retry first looks for its own earlier result, in its receipt or in the log. If there is none, it runs, and leaves a
mark beside its writes: a first attempt that arrives later finds the mark and does nothing.
"""

from __future__ import annotations

from typing import Final

from limpet.errors import Unavailable
from limpet.model import Batch, Entry
from limpet.request_ids import request_group

__all__ = ["SUPERSEDED_MS", "make_mark", "may_be_superseded", "superseded_error"]

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


def make_mark(request_id: str, now_ms: int) -> Entry:
    """Make the mark by which the first attempt of a request is superseded, as an entry of the family ``superseded``."""
    return Entry(request_group(request_id), b"null", 1, 0, 0, now_ms, now_ms, now_ms + SUPERSEDED_MS)
