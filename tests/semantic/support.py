"""Shared by the tests of semantic entries."""

from __future__ import annotations

import asyncio
from typing import Any

import limpet
from limpet.clock import SystemClock
from limpet.semantic.store import Audit

SECRET = bytes(range(32))
KEY = "tenant/acme/project/docs/onedrive/delta"
CHECKPOINT: dict[str, Any] = {"purpose": "checkpoint", "producer": "harvester", "consumerHints": ["search", "chat"]}
WRITER = "harvester:nightly-sync"


def audit(**options: Any) -> Audit:
    return Audit(SECRET, **options)


def lock_of(seconds: float) -> dict[str, Any]:
    return {"purpose": "lock", "producer": "scheduler", "consumerHints": [], "ttlSeconds": seconds}


class SelfTurning(limpet.ManualClock):
    """A clock that advances by itself when a task sleeps, and records the sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        if seconds > 0:
            self.slept.append(seconds)
            self.advance(seconds)


class Hasty(SystemClock):
    """A clock that does not wait."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
