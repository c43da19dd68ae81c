"""A store of a test's own on every engine."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

ENGINES = ("memory", "sqlite", "postgres", "redis", "nats")


def url_of(engine: str, folder: Path) -> str:
    """A URL of an engine. On a server the store is shared: its tests take namespaces of their own."""
    return {
        "memory": f"memory:{uuid.uuid4().hex[:12]}",
        "sqlite": f"sqlite:///{folder}/state.db",
        "postgres": f"{os.environ['LIMPET_TEST_POSTGRES']}?schema=shared_{os.getpid()}",
        "redis": os.environ["LIMPET_TEST_REDIS"].rpartition("/")[0] + "/61",
        "nats": f"{os.environ['LIMPET_TEST_NATS']}?bucket_prefix=shared-",
    }[engine]


def unique(word: str = "test") -> str:
    """A namespace of a test's own."""
    return f"{word}-{uuid.uuid4().hex[:12]}"
