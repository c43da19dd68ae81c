"""Request ids: names of writes, unique across processes, so that a write can be sent again and applied once."""

from __future__ import annotations

import itertools
import os
import re
from typing import Final

__all__ = ["is_generated", "new_request_id", "request_group"]


class _RequestIds:
    """Makes ids that are unique across processes: a random prefix for each process, then a counter."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.prefix = os.urandom(8).hex()
        self.numbers = itertools.count(1)


_request_ids = _RequestIds()
os.register_at_fork(after_in_child=_request_ids.renew)
_GENERATED: Final = re.compile(r"([0-9a-f]{16}-[0-9a-f]+)(?:\.[0-9]+)?\Z")


def new_request_id() -> str:
    """Make a new request id, unique across processes."""
    return f"{_request_ids.prefix}-{next(_request_ids.numbers):x}"


def is_generated(request_id: str) -> bool:
    """Whether an id has the form of those that are made for writes without an id of their caller."""
    return _GENERATED.match(request_id) is not None


def request_group(request_id: str) -> str:
    """The group in which a batch was first sent, by its request id; the id itself if a caller chose it."""
    generated = _GENERATED.match(request_id)
    return request_id if generated is None else generated[1]
