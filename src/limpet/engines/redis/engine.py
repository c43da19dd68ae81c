"""The Redis engine: state in the memory of a server that many processes share.

Batches are planned here, by `limpet.commit.committer`. One script on the server compares what a plan has read and
writes what it leaves, so that no reader sees a group half applied. Usual writes have a short way through the script:
it decides them as `limpet.transition.plan` would, a test holds it to that, and it leaves everything unusual to a plan.
The script never decodes a value.

The log is a stream whose ids are revisions. Entries expire by our own rule and the server's time: a key
that Redis expires by itself would leave no change in the log.

After a failover, or a crash of a server that does not sync each write, the revision counter may be old.
So the server's replication id is kept beside it. An engine that finds another id first raises the counter
far beyond any revision that a client can have seen; watchers that saw lost changes get `Compacted`.

`requests` encodes what the script takes, `replies` decodes what comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec
from redis import exceptions

from limpet.clock import Clock
from limpet.commit.committer import Committer
from limpet.commit.log import check_after
from limpet.commit.receipts import superseded_error
from limpet.commit.relative import Moment, resolve_receipt
from limpet.commit.storage import ReplyLost, Stale, Unit
from limpet.engine import Engine
from limpet.engines.redis.connection import REPLY_S, Connection, connect, create_pool, read_durability, read_info
from limpet.engines.redis.errors import (
    Superseded,
    bad_url_error,
    foreign_key_error,
    is_connection_lost,
    translate_error,
    translate_message,
)
from limpet.engines.redis.replies import (
    decode_change,
    decode_changes,
    decode_entry,
    decode_entry_or_error,
    decode_fingerprint,
    decode_written,
    needs_script,
)
from limpet.engines.redis.requests import (
    Item,
    encode_field,
    encode_item,
    encode_items,
    find_items,
    load_script,
)
from limpet.engines.redis.units import decode_reply, encode_units
from limpet.engines.server_engine import CommitResult, ReadResult, ServerEngine, Ticket
from limpet.errors import Compacted, InvalidNamespace, InvalidValue, LimpetError, Unavailable
from limpet.index import CANDIDATES_MAX, IndexProbe
from limpet.keys import Span, check_namespace
from limpet.model import (
    Batch,
    Change,
    Commit,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    Refusal,
    ScanPage,
    Status,
    Traits,
    Window,
)
from limpet.request_ids import new_request_id
from limpet.urls import Address

LISTEN_MS: Final = 5_000
PAGE_BYTES_MAX: Final = 4_000_000
UNUSUAL_GROUPS: Final = 100

_STORE_KEY: Final = "limpet:store"


async def open(address: Address, clock: Clock) -> Engine:
    """Open ``redis://host:6379/0``; ``rediss:`` is the same over TLS. Any server of a cluster stands for all of it."""
    address.allow("hash_tag", "eviction", "wait", "clock")
    has_hash_tag = address.take("hash_tag", "namespace", ("namespace", "none")) == "namespace"
    allows_eviction = address.take("eviction", "refuse", ("refuse", "allow")) == "allow"
    test_clock = address.take("clock", "server", ("server", "test")) == "test"
    wait = address.options.get("wait", "0")
    if not wait.isdigit():
        raise InvalidValue(f"{address}: wait is a number of replicas")
    try:
        parts = urlsplit(address.url.partition("?")[0])
    except ValueError as error:
        raise bad_url_error(address) from error

    async def open_server(server: tuple[str, int] | None = None) -> RedisEngine:
        login, at, _ = parts.netloc.rpartition("@")
        netloc = parts.netloc if server is None else f"{login}{at}{server[0]}:{server[1]}"
        try:
            pool = create_pool(urlunsplit(parts._replace(netloc=netloc)))
        except ValueError as error:
            raise bad_url_error(address) from error
        engine = RedisEngine(pool, str(address), has_hash_tag=has_hash_tag, replicas=int(wait), test_clock=test_clock)
        try:
            await engine.prepare(allows_eviction=allows_eviction)
            if not engine.in_cluster:
                await engine.load_store_id()
        except BaseException:
            await engine.close()
            raise
        return engine

    engine = await open_server()
    if not engine.in_cluster:
        return engine
    from limpet.engines.redis.cluster import RedisCluster

    cluster = RedisCluster(engine, (parts.hostname or "localhost", parts.port or 6379), open_server)
    try:
        if not has_hash_tag:
            raise InvalidValue(f"{address}: in a cluster the keys of a namespace must have a hash tag")
        if test_clock:
            raise InvalidValue(f"{address}: clock=test is not for a cluster, where each server has its own clock")
        await cluster.prepare()
    except BaseException:
        await cluster.close()
        raise
    return cluster


class RedisEngine(ServerEngine):
    """A handle on a Redis server."""

    _reads_at_once = 2
    _commits_at_once = 2

    def __init__(
        self,
        pool: Any,
        display_name: str,
        *,
        has_hash_tag: bool = True,
        replicas: int = 0,
        test_clock: bool = False,
    ) -> None:
        self.traits = Traits(engine="redis", durability="none", clock="server", inline=False)
        self._pool = pool
        self._script, self._script_hash = load_script(test_clock=test_clock)
        self._has_hash_tag = has_hash_tag
        self._replicas = replicas
        # The replication id of the server behind each open connection.
        self._replication_ids: dict[Connection, str] = {}
        self._store_id, self._epoch = "", 1
        self.in_cluster = False
        # Namespaces in which the short way has left everything, and how many groups go the long way before it is tried
        # again.
        self._unusual: dict[str, int] = {}
        # Namespaces whose last read met an entry that a plain command cannot read.
        self._needs_script: set[str] = set()
        super().__init__(self._connect_to_server, display_name)

    def _init_process_state(self) -> None:
        super()._init_process_state()
        # Namespaces in which a lone write is under way, or whose last commits came several at a time.
        self._busy: set[str] = set()
        self._committer = Committer(self, self._display_name)

    # The ten primitives, but for those that are shared ------------------------

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
        reverse: bool = False,
    ) -> ScanPage:
        """See `Engine.scan`."""
        self._check_open()
        start, stop = _lex_bounds(span)
        with_value = values or where is not None
        bytes_max = PAGE_BYTES_MAX if with_value else 2**53
        bounds = (stop, start) if reverse else (start, stop)
        parameters = ("scan", family, *bounds, limit, bytes_max, int(with_value), int(reverse))
        cursor, found = await self._run(namespace, *parameters)
        pairs = zip(found[::2], found[1::2], strict=True)
        entries = [decode_entry(key.decode(), text, with_value=with_value) for key, text in pairs]
        if where is not None:
            entries = [entry for entry in entries if entry.stored is not None and where.matches(entry.stored)]
            entries = entries if values else [entry.without_value() for entry in entries]
        return ScanPage(entries, None if cursor is None else cursor.decode())

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`."""
        self._check_open()
        count, expired = await self._run(namespace, "count", family, *_lex_bounds(span))
        return int(count) - sum(key.decode() in span for key in expired)

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`. The server has no list of them, so this walks through all names of keys."""
        self._check_open()
        return sorted([name async for name in self._find_namespaces()])

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        self._check_open()
        found = await self._run(namespace, "due", limit)
        return [Expire(key.decode(), revision, family.decode()) for family, key, revision in found]

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        self._check_open()
        bounds = (window.age_ms, window.changes, window.size_bytes, window.age_ms_min)
        dropped: int = await self._run(namespace, "trim", *bounds)
        return dropped

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        self._check_open()
        revision, floor, keys, size_bytes, log_changes, log_bytes, *times = await self._run(namespace, "status")
        now_ms = self._observe_time(namespace, times[0])
        return Status(
            store_id=self._store_id,
            epoch=self._epoch,
            revision=revision,
            floor=floor,
            keys=keys,
            size_bytes=size_bytes,
            log_changes=log_changes,
            log_bytes=log_bytes,
            now_ms=now_ms,
            behind_ms=max(0, now_ms - times[1]),
        )

    # Reading ------------------------------------------------------------------

    async def _read_all(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        self._committer.known(namespace).contention.note_read(family, keys)
        if family != "data" or namespace in self._needs_script:
            return await self._read_by_script(namespace, family, keys)
        entries: list[ReadResult] = []
        for key, text in zip(keys, await self._request("HMGET", self._key(namespace, "data"), *keys), strict=True):
            entry = None if text is None else decode_entry(key, text)
            if entry is not None and needs_script(entry):
                self._needs_script.add(namespace)
                return await self._read_by_script(namespace, family, keys)
            entries.append(entry)
        return entries

    async def _read_by_script(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        """Read any entries: also those that expire, by the server's time, and records with their fields."""
        texts = await self._run(namespace, "read", family, *keys)
        if family == "receipt":
            return [
                None if text is None else resolve_receipt(decode_entry(key, text))
                for key, text in zip(keys, texts, strict=True)
            ]
        entries = [
            None if text is None else decode_entry_or_error(key, text) for key, text in zip(keys, texts, strict=True)
        ]
        if not any(isinstance(entry, Entry) and needs_script(entry) for entry in entries):
            self._needs_script.discard(namespace)
        return entries

    async def _read_log(self, namespace: str, after: int, limit: int, span: Span | None) -> LogPage:
        before: str | None = None
        while True:
            reply = await self._run(namespace, "changes", after, limit, PAGE_BYTES_MAX)
            revision, floor, survived, more, items, logged = reply
            check_after(after, floor=floor, revision=revision)
            if survived is not None:
                raise Compacted(f"the server lost all changes after revision {int(survived)}, and {after} with them")
            before = before or decode_fingerprint(logged)
            if not limit:
                return LogPage([], after, before)
            changes = [change for last, item in items for change in decode_changes(item, last)]
            changes = [change for change in changes if change.revision > after]
            is_full = more is not None or len(changes) > limit
            changes = changes[:limit]
            next_after = changes[-1].revision if is_full else revision
            if span is not None:
                changes = [change for change in changes if change.family == "data" and change.key in span]
            if changes or not is_full:
                return LogPage(changes, next_after, before)
            after = next_after

    def _listen_to(self, namespace: str) -> None:
        self._keep_listening(namespace, functools.partial(self._listen, namespace))

    async def _listen(self, namespace: str) -> None:
        """Notify waiters whenever the stream of a namespace grows."""
        connection, log = await self._connect_to_server(), self._key(namespace, "log")
        try:
            while True:
                newest = await connection.request("XREVRANGE", log, "+", "-", "COUNT", 1)
                # Notify first: a change may have come before we listened.
                self._wakeup.notify(namespace)
                after, found = newest[0][0] if newest else "0-0", None
                while not found:
                    found = await connection.request("XREAD", "BLOCK", LISTEN_MS, "COUNT", 1, "STREAMS", log, after)
        finally:
            self._abort(connection)

    # Epochs -------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`."""
        await self.skip_revisions(skip)
        return await self.next_epoch()

    async def skip_revisions(self, skip: int) -> None:
        """Skip so many revisions in every namespace on this server."""
        self._check_open()
        async for name in self._find_namespaces():
            await self._run(name, "skip", skip)

    async def _find_namespaces(self) -> AsyncIterator[str]:
        """Find the namespaces on this server, each once."""
        data = self._key("*", "data")
        before, after = (part.encode() for part in data.split("*"))
        cursor, known = b"0", set[str]()
        while True:
            cursor, found = await self._request("SCAN", cursor, "MATCH", data, "COUNT", 1000)
            for key in found:
                name = key.removeprefix(before).removesuffix(after).decode(errors="replace")
                # Another program's key may look like one of ours, and a walk may return a key twice.
                with contextlib.suppress(InvalidNamespace):
                    if check_namespace(name) not in known:
                        known.add(name)
                        yield name
            if cursor == b"0":
                return

    async def next_epoch(self) -> int:
        """Begin a new epoch of the store, whose id this server keeps."""
        store_id, epoch = await self.load_store_id()
        await self._request("SET", _STORE_KEY, f"{store_id} {epoch + 1}")
        return (await self.load_store_id())[1]

    # Indexes ------------------------------------------------------------------

    async def index(self, namespace: str, field: str) -> None:
        """See `Indexing.index`."""
        self._check_open()
        state = await self._run(namespace, "index", field)
        after: bytes | None = b"" if state == b"building" else None
        while after is not None:
            after = await self._run(namespace, "build", field, after)

    async def unindex(self, namespace: str, field: str) -> None:
        """See `Indexing.unindex`."""
        self._check_open()
        await self._run(namespace, "unindex", field)

    async def indexes(self, namespace: str) -> list[str]:
        """See `Indexing.indexes`."""
        self._check_open()
        found = await self._run(namespace, "indexes")
        pairs = zip(found[::2], found[1::2], strict=True)
        return sorted(field.decode() for field, state in pairs if state == b"ready")

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """See `Indexing.candidates`."""
        self._check_open()
        parameters: list[Any] = []
        for probe in wanted:
            texts = [encode_field(text) for text in probe.texts]
            parameters += [probe.name, repr(probe.low), repr(probe.high), int(probe.all_texts), len(texts), *texts]
        found = await self._run(namespace, "candidates", CANDIDATES_MAX, *parameters)
        return None if found is None else [key for key in map(bytes.decode, found) if key in span]

    # Committing ---------------------------------------------------------------

    def commit(self, namespace: str, batch: Batch) -> Coroutine[Any, Any, Commit | Refusal]:
        """See `Engine.commit`."""
        is_lone = namespace not in self._busy and namespace not in self._commits and not self._replicas
        is_lone = is_lone and not (batch.guards and self._committer.is_contended(namespace, [batch]))
        item = encode_item(batch) if is_lone and namespace not in self._unusual else None
        return super().commit(namespace, batch) if item is None else self._write_alone(namespace, batch, item)

    async def _write_alone(self, namespace: str, batch: Batch, item: Item) -> Commit | Refusal:
        """Send a lone write from its caller's own task: a worker task would take two turns of the loop more.

        Like other commits, it is finished even if its caller is cancelled or the engine is closed meanwhile.
        """
        self._check_open()
        # Encode first, which may fail: after that there is a request to finish.
        body = encode_items([item], [batch.writer])
        command, loop = self._script_command(namespace, "write"), asyncio.get_running_loop()
        replied, finished = loop.create_future(), loop.create_future()
        name, since = new_request_id(), self._latest.get(namespace, 0)

        def finish() -> None:
            self._busy.discard(namespace)
            self._tasks.discard(finished)
            finished.set_result(None)

        def on_reply(reply: Any) -> None:
            self._return_to_pool(connection)
            finish()
            if not replied.done():
                replied.set_result(reply)

        self._busy.add(namespace)
        self._tasks.add(finished)
        try:
            connection = await self._acquire()
        except BaseException:
            finish()
            raise
        connection.send((*command, self._replication_ids[connection], since, name, body), on_reply)
        reply = await replied
        if isinstance(reply, Exception) and self._is_connection_lost(reply):
            raise self._ambiguous(f"{name}.1", since, reply)
        if isinstance(reply, Exception) or reply[0] == b"counter_lost":
            # Nothing was applied. The ordinary way handles whatever was in the way.
            return await super().commit(namespace, batch)
        if reply[0] == b"superseded":
            raise superseded_error()
        try:
            (result,) = self._decode_written(namespace, [batch], reply)
        except ReplyLost as error:
            raise self._ambiguous(f"{name}.1", since, error.__cause__) from error
        if result is not None:
            return result
        # A batch with an id of its own goes the long way.
        return await super().commit(namespace, msgspec.structs.replace(batch, request_id=new_request_id()))

    async def _commit_group(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        # Commits that came several at a time will do so again: let the next ones gather.
        (self._busy.add if len(group) > 1 else self._busy.discard)(namespace)
        batches = [ticket.batch for ticket in group]
        long_groups = self._unusual.pop(namespace, 0)
        if long_groups > 1:
            self._unusual[namespace] = long_groups - 1
        items = {} if long_groups else find_items(batches)
        results: list[CommitResult | None]
        if len(items) == len(group):
            results = [*await self._write_items(namespace, [*items.values()], batches, since)]
        else:
            results = [None] * len(group)
            if items:
                short = [batches[number] for number in items]
                written = await self._write_items(namespace, [*items.values()], short, since)
                for number, outcome in zip(items, written, strict=True):
                    results[number] = outcome
        left = [number for number, result in enumerate(results) if result is None]
        if left:
            try:
                found = await self._commit_long(namespace, [batches[number] for number in left], since)
            except Exception as error:
                if len(left) == len(group):
                    raise
                # The others are applied and keep their results.
                found = await self._commit_each(namespace, [group[number] for number in left], since, error)
            for number, result in zip(left, found, strict=True):
                results[number] = result
        return [result for result in results if result is not None]

    async def _write_items(
        self, namespace: str, items: list[Item], batches: list[Batch], since: int
    ) -> Sequence[CommitResult | None]:
        """Commit batches the short way. The result is None for each that it leaves."""
        contention = self._committer.known(namespace).contention
        await contention.let_others_write(batches)
        name, body = new_request_id(), encode_items(items, [batch.writer for batch in batches])
        started_at = time.monotonic()
        try:
            reply = await self._decide(namespace, "write", name, body)
            contention.round_trip_s = time.monotonic() - started_at
            return self._decode_written(namespace, batches, reply)
        except Superseded:
            return [superseded_error() for _ in batches]
        except ReplyLost as error:
            return [self._ambiguous(f"{name}.{number}", since, error.__cause__) for number in range(1, len(items) + 1)]

    def _decode_written(self, namespace: str, batches: list[Batch], reply: Any) -> Sequence[Commit | Refusal | None]:
        """The results of batches that went the short way; None for each that was left."""
        if reply[0] == b"left":
            self._unusual[namespace] = UNUSUAL_GROUPS
            return [None] * len(batches)
        try:
            results = decode_written(batches, *reply[1:])
        except Exception as error:
            # It was applied. A reply that cannot be decoded counts as a lost one.
            raise ReplyLost from error
        self._committer.known(namespace).note_results(batches, results)
        self._record_revision(namespace, max([one.revision for one in results if type(one) is Commit], default=0))
        return results

    async def _commit_long(self, namespace: str, group: Sequence[Batch], since: int) -> Sequence[CommitResult]:
        """Plan batches of any kind here, and let the server compare and write."""
        results = await self._committer.commit(namespace, group, since)
        self._record_revision(namespace, max((one.revision for one in results if isinstance(one, Commit)), default=0))
        return results

    async def apply(self, namespace: str, name: str, units: Sequence[Unit]) -> Sequence[Moment | Stale | LimpetError]:
        """See `Storage.apply`."""
        body = encode_units(units)
        try:
            _, now_ms, replies = await self._decide(namespace, "apply", name, body)
        except Superseded:
            return [superseded_error() for _ in units]
        try:
            return [self._decode_reply(*one, now_ms) for one in zip(units, replies, strict=True)]
        except Exception as error:
            # It was applied. A reply that cannot be decoded counts as a lost one.
            raise ReplyLost from error

    def _decode_reply(self, unit: Unit, reply: list[Any], now_ms: int) -> Moment | Stale | LimpetError:
        match reply[0]:
            case b"failed":
                return translate_message(self._display_name, reply[1].decode())
            case b"foreign":
                return foreign_key_error(*(word.decode() for word in reply[1:]))
            case _:
                return decode_reply(unit, reply, now_ms)

    async def find_changes(self, namespace: str, after: int, origin: str) -> list[Change]:
        """See `Storage.find_changes`."""
        found = await self._run(namespace, "find", after, origin)
        return [decode_change(label, text, int(at_ms)) for label, text, at_ms in found]

    async def _decide(self, namespace: str, verb: str, *parameters: Any) -> Any:
        """Send a group to the script, and return its reply."""
        seen = self._latest.get(namespace, 0)
        while True:
            sent, reply = False, None
            try:
                async with self._borrow_connection() as connection:
                    replication_id = self._replication_ids[connection]
                    sent = True
                    reply = await self._call(connection, namespace, verb, replication_id, seen, *parameters)
                    if reply[0] in (b"ok", b"written") and self._replicas:
                        await self._await_replicas(connection)
            except Exception as error:
                if reply is not None or (sent and self._is_connection_lost(error)):
                    raise ReplyLost from error
                raise self._translate(error) from error
            if reply[0] == b"superseded":
                raise Superseded
            if reply[0] != b"counter_lost":
                return reply
            # What this process knows may be of writes that the server has lost.
            self._committer.forget(namespace)
            seen = await self._reseed_counter(namespace, seen)

    async def _reseed_counter(self, namespace: str, seen: int) -> int:
        """Raise the revision counter of another server, or of one that lost writes, beyond all revisions seen of it."""
        try:
            async with self._borrow_connection() as connection:
                revision: int = await self._call(
                    connection, namespace, "reseed_counter", self._replication_ids[connection], seen
                )
        except Exception as error:
            raise self._translate(error) from error
        self._wakeup.notify(namespace)
        return min(seen, revision)

    async def _await_replicas(self, connection: Connection) -> None:
        reached = await connection.request("WAIT", self._replicas, int(1000 * REPLY_S / 2))
        if reached < self._replicas:
            raise TimeoutError(f"{reached} of {self._replicas} replicas have it")

    # Connections --------------------------------------------------------------

    async def prepare(self, *, allows_eviction: bool = False) -> None:
        """Check that the server can serve, and learn what its writes survive."""
        try:
            async with self._borrow_connection() as connection:
                role = await read_info(connection, "replication", "role")
                self.in_cluster = await read_info(connection, "cluster", "cluster_enabled") == "1"
                if role != "master" and not self.in_cluster:
                    raise Unavailable(f"{self._display_name} is a replica, which takes no writes")
                policy = await read_info(connection, "memory", "maxmemory_policy")
                limit = await read_info(connection, "memory", "maxmemory")
                durability = await read_durability(connection, self._replicas)
        except Exception as error:
            raise self._translate(error) from error
        if policy.startswith("allkeys") and limit != "0" and not allows_eviction:
            raise InvalidValue(
                f"{self._display_name} forgets keys when its memory is full (maxmemory-policy {policy}): "
                "set noeviction, or give ?eviction=allow"
            )
        self.traits = msgspec.structs.replace(self.traits, durability=durability)

    async def load_store_id(self) -> tuple[str, int]:
        """The id of the store and its epoch. Of several engines that find no id, one sets it."""
        found = await self._request("GET", _STORE_KEY)
        if found is None:
            await self._request("SET", _STORE_KEY, os.urandom(8).hex(), "NX")
            found = await self._request("GET", _STORE_KEY)
        # The first epoch is not written.
        store_id, _, epoch = found.decode().partition(" ")
        self._store_id, self._epoch = store_id, int(epoch or 1)
        return self._store_id, self._epoch

    async def _connect_to_server(self) -> Connection:
        connection = await connect(self._pool.make_connection())
        try:
            self._replication_ids[connection] = await read_info(connection, "replication", "master_replid")
        except BaseException:
            self._abort(connection)
            raise
        return connection

    async def _request(self, *command: Any) -> Any:
        """Send a command that may be sent again."""
        try:
            async with self._borrow_connection() as connection:
                return await connection.request(*command)
        except Exception as error:
            raise self._translate(error) from error

    async def _run(self, namespace: str, *parameters: Any) -> Any:
        """Call the script with a request that may be sent again."""
        try:
            async with self._borrow_connection() as connection:
                return await self._call(connection, namespace, *parameters)
        except Exception as error:
            raise self._translate(error) from error

    async def _call(self, connection: Connection, namespace: str, verb: str, *parameters: Any) -> Any:
        command = self._script_command(namespace, verb, *parameters)
        try:
            return await connection.request(*command)
        except exceptions.NoScriptError:
            return await connection.request("EVAL", self._script, *command[2:])

    def _script_command(self, namespace: str, verb: str, *parameters: Any) -> tuple[Any, ...]:
        """The command that calls the script."""
        prefix = f"{{{namespace}}}:" if self._has_hash_tag else f"{namespace}:"
        return "EVALSHA", self._script_hash, "1", self._key(namespace, "data"), verb, prefix, *parameters

    def _key(self, namespace: str, name: str) -> str:
        if self._has_hash_tag:
            return f"limpet:{{{namespace}}}:{name}"
        if namespace == "limpet":
            raise InvalidValue("without a hash tag no namespace may be called 'limpet', as our own keys are")
        return f"limpet:{namespace}:{name}"

    async def _disconnect(self, connection: Connection) -> None:
        self._abort(connection)
        # The transport closes its socket in the next turn of the loop, which may be the last.
        await asyncio.sleep(0)

    def _abort(self, connection: Connection) -> None:
        self._replication_ids.pop(connection, None)
        connection.abort()

    def _is_closed(self, connection: Connection) -> bool:
        return connection.is_closed

    def _is_connection_lost(self, error: BaseException) -> bool:
        return is_connection_lost(error)

    def _translate_driver_error(self, error: Exception) -> Exception:
        return translate_error(self._display_name, error)


def _lex_bounds(span: Span) -> tuple[str, str]:
    """The bounds of a span for commands such as ZRANGEBYLEX."""
    return f"[{span.start}" if span.start else "-", "+" if span.stop is None else f"({span.stop}"
