"""What the conformance suite needs to judge our engines: connections that can be cut, and what is stored."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from limpet.conformance.plugin import Line
from limpet.engines.sorted_keys import SortedKeys

# A commit on PostgreSQL is one call of a function, or a transaction. The proxy loses no reply inside a transaction.
POSTGRES_COMMIT = r"limpet_(?!now_ms\b|take\b)\w+\(|COMMIT;"
# The verbs of the script that commit.
REDIS_COMMIT = rb"\r\n(apply|commit|put|write)\r\n"


class CutLine:
    """A way to a server through a proxy that loses the reply to a commit, and its connection with it."""

    def __init__(self, proxy: Any, fault: tuple[str | bytes, ...]) -> None:
        self._proxy = proxy
        self._fault = fault
        self.url: str = proxy.url

    @property
    def cuts(self) -> int:
        """See `Line.cuts`."""
        return int(self._proxy.faults)

    def cut(self) -> None:
        """See `Line.cut`."""
        self._proxy.fault(*self._fault)


@contextmanager
def line_of(url: str) -> Iterator[Line]:
    """A way to the server of one of our engines."""
    from tests.nats.support import proxy_of as nats_proxy
    from tests.postgres.proxy import Proxy as PostgresProxy
    from tests.proxy import HttpProxy
    from tests.redis.support import proxy_of as redis_proxy

    faults: dict[str, tuple[str | bytes, ...]] = {
        "postgresql": ("lose commit", POSTGRES_COMMIT),
        "redis": ("lose", REDIS_COMMIT),
    }
    proxies: dict[str, Callable[[str], Any]] = {
        "http": HttpProxy,
        "nats": nats_proxy,
        "postgresql": PostgresProxy,
        "redis": redis_proxy,
    }
    scheme = url.partition(":")[0]
    with proxies[scheme](url) as proxy:
        yield CutLine(proxy, faults.get(scheme, ("lose",)))


def count_stored(url: str, namespace: str) -> int:
    """Count what is stored for a namespace of one of our engines, without what the server ends by itself."""
    counters: dict[str, Callable[[str, str], int]] = {
        "http": _count_on_limpet,
        "memory": _count_in_memory,
        "nats": lambda url, namespace: asyncio.run(_count_on_nats(url, namespace)),
        "postgresql": lambda url, namespace: asyncio.run(_count_on_postgres(url, namespace)),
        "redis": _count_on_redis,
        "sqlite": _count_in_file,
    }
    return counters[url.partition(":")[0]](url, namespace)


def _count_in_memory(url: str, namespace: str) -> int:
    from limpet.engines.memory import _shared

    return count_items(_shared[url.partition(":")[2].partition("?")[0]].namespaces[namespace])


def count_items(namespace: Any) -> int:
    """Count the items of all lists and dicts of a namespace of the memory engine, and of the dicts in them."""
    held = [one for one in vars(namespace).values() if isinstance(one, list | dict)]
    return sum(sum(map(_count_one, one.values() if isinstance(one, dict) else one)) for one in held)


def _count_one(held: object) -> int:
    return len(held) if isinstance(held, dict) else not isinstance(held, SortedKeys)


def _count_in_file(url: str, namespace: str) -> int:
    connection = sqlite3.connect(url.partition("://")[2].partition("?")[0])
    try:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'limpet_%'")
        tables = [name for (name,) in names if "namespace" in _columns(connection, name)]
        counts = [
            connection.execute(f"SELECT count(*) FROM {table} WHERE namespace = ?", (namespace,)).fetchone()[0]
            for table in tables
        ]
    finally:
        connection.close()
    return sum(counts)


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


async def _count_on_postgres(url: str, namespace: str) -> int:
    import asyncpg

    schema = parse_qs(urlsplit(url).query)["schema"][0]
    connection = await asyncpg.connect(url.partition("?")[0])
    try:
        rows = await connection.fetch(
            "SELECT table_name FROM information_schema.columns JOIN information_schema.tables"
            " USING (table_schema, table_name) WHERE table_schema = $1 AND column_name = 'namespace'"
            " AND table_type = 'BASE TABLE'",
            schema,
        )
        counts = [
            await connection.fetchval(f'SELECT count(*) FROM "{schema}".{table} WHERE namespace = $1', namespace)
            for (table,) in rows
        ]
        marks = await connection.fetchval(
            f'SELECT superseded FROM "{schema}".limpet_namespaces WHERE namespace = $1', namespace
        )
    finally:
        await connection.close()
    return int(sum(counts)) + len(json.loads(marks or "{}"))


def _count_on_redis(url: str, namespace: str) -> int:
    import redis

    sizes = {b"string": "strlen", b"hash": "hlen", b"zset": "zcard", b"stream": "xlen", b"list": "llen"}
    with redis.Redis.from_url(url.partition("?")[0]) as client:
        keys = [key for key in client.scan_iter(f"*{{{namespace}}}:*", 1000) if client.ttl(key) == -1]
        kinds = [(key, sizes[client.type(key)]) for key in keys]
        return sum(1 if size == "strlen" else int(getattr(client, size)(key)) for key, size in kinds)


async def _count_on_nats(url: str, namespace: str) -> int:
    import nats

    bucket = parse_qs(urlsplit(url).query)["bucket_prefix"][0] + namespace
    client = await nats.connect(url.partition("?")[0])
    try:
        request = json.dumps({"subjects_filter": ">"}).encode()
        reply = await client.request(f"$JS.API.STREAM.INFO.KV_{bucket}", request, timeout=10)
    finally:
        await client.close()
    subjects = json.loads(reply.data)["state"].get("subjects") or {}
    # Receipts and the marks of superseded requests have a time to live of the server.
    ended_by_server = (f"$LMP.{bucket}.r.", f"$LMP.{bucket}.o.")
    return sum(count for subject, count in subjects.items() if not subject.startswith(ended_by_server))


def _count_on_limpet(url: str, namespace: str) -> int:
    place = url.partition("?")[0]
    with urllib.request.urlopen(f"{place}/stored/{namespace}", timeout=30) as reply:  # noqa: S310
        return int(json.load(reply))


def is_ours(url: str) -> bool:
    """Whether a URL is of a server that the test run has started."""
    servers = [os.environ[f"LIMPET_TEST_{name}"] for name in ("POSTGRES", "REDIS", "NATS", "HTTP")]
    return url.startswith(tuple(server.rpartition("/")[0] if "redis" in server else server for server in servers))
