"""Request ids: names of writes, unique over processes, so that a write can be sent again and applied once."""

from __future__ import annotations

import itertools
import os
import re
from typing import Final

__all__ = ["is_made_here", "new_request_id"]


class _RequestIds:
    """Ids that are unique over processes, at the price of a counter."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.prefix = os.urandom(8).hex()
        self.numbers = itertools.count(1)


_request_ids = _RequestIds()
os.register_at_fork(after_in_child=_request_ids.renew)
_MADE_HERE: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]+(?:\.[0-9]+)?\Z")


def new_request_id() -> str:
    """A new request id, unique over processes."""
    return f"{_request_ids.prefix}-{next(_request_ids.numbers):x}"


def is_made_here(request_id: str) -> bool:
    """Whether an id looks like one that was made for a write that was given none."""
    return _MADE_HERE.match(request_id) is not None
