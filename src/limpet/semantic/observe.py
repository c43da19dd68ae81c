"""What is logged of each semantic write, and what an observer is notified of. Never a value."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from limpet.model import Commit
from limpet.semantic.model import VersionConflict, directive_of
from limpet.semantic.writes import EntryWrite, Verb, WriteRequest, purpose_of

__all__ = ["Observation", "ObservedOutcome", "WriteReporter", "log_event"]

log = logging.getLogger("limpet.semantic")

ObservedOutcome = Literal["success", "replayed", "conflict"]


class Observation(msgspec.Struct, frozen=True):
    """A write, as an observer is notified of it.

    Attributes:
        verb: ``kvPut``, ``kvDelete`` or ``kvRecover``.
        outcome: ``success``, ``replayed`` or ``conflict``.
        namespace: The namespace.
        purpose: What the entry is for; empty where that is not known.
        key: The key.
        request_id: The request id.
    """

    verb: Verb
    outcome: ObservedOutcome
    namespace: str
    purpose: str
    key: str
    request_id: str


class WriteReporter:
    """Logs each write of a namespace, and notifies the observer of it."""

    def __init__(self, namespace: str, observer: Callable[[Observation], None] | None) -> None:
        self._namespace = namespace
        self._observer = observer

    def report_success(self, request: WriteRequest, commit: Commit) -> None:
        """Report the writes of a commit. A delete of an absent key is not one."""
        for number, write in enumerate(request.writes):
            entry = commit.entries[number] if write.value is not None else commit.ended[number]
            if entry is None:
                continue
            purpose = write.purpose or purpose_of(entry)
            extra = {"replayed": True} if commit.replayed else {}
            self._log(logging.INFO, request, write, purpose, entry.version, extra)
            self._observe("replayed" if commit.replayed else "success", request, write, purpose)

    def report_conflict(self, request: WriteRequest, conflict: VersionConflict) -> None:
        """Report a conflict, of the write that it refused."""
        write = next(write for write in request.writes if write.key == conflict.key)
        # A delete names no purpose; the entry that it would have ended does.
        purpose = write.purpose or purpose_of(conflict.current)
        extra = {
            "conflict": conflict.reason,
            "expectedVersion": write.expected_version,
            "correlationId": request.request_id,
        }
        self._log(logging.WARNING, request, write, purpose, conflict.version, extra)
        self._observe("conflict", request, write, purpose)

    def _log(
        self,
        level: int,
        request: WriteRequest,
        write: EntryWrite,
        purpose: str,
        version: int | None,
        extra: dict[str, Any],
    ) -> None:
        members = {
            "event": write.verb,
            "directive": directive_of(request.writer),
            "key": write.key,
            "purpose": purpose,
            "requestId": request.request_id,
            "version": version,
        }
        log_event(level, members | extra)

    def _observe(self, outcome: ObservedOutcome, request: WriteRequest, write: EntryWrite, purpose: str) -> None:
        if self._observer is not None:
            observation = Observation(write.verb, outcome, self._namespace, purpose, write.key, request.request_id)
            self._observer(observation)


def log_event(level: int, members: dict[str, Any]) -> None:
    """Log an event with its members: as text, and as members of the log record.

    A log record has its own ``name`` and some others, so no member may be called so.
    """
    text = " ".join(f"{name}={member}" for name, member in members.items() if name != "event")
    log.log(level, "%s %s", members["event"], text, extra=members)
