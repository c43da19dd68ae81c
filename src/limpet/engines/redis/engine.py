"""The Redis engine: state in the memory of a server that many processes share.

One script on the server decides a group of batches as `limpet.transition.plan` would, so a group
is one round trip and nobody sees it half done. It is held to `plan` by the same suite, and it
moves the bytes of values without looking into them: where a guard asks for a member of a JSON
object, the look is taken here, and the script is asked again for the entry that was looked at.

The log is a stream whose ids are revisions. Expiry is our own, by the server's time: a key that
Redis ends by itself would leave no change.

After a failover, or a crash of a server that does not sync each write, the counter may come back
old. So the server's replication id is kept beside it. Whoever finds another one raises the counter
first, far beyond what anybody can have seen; watchers who saw what was lost are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import re
import struct
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec
from redis import exceptions
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from limpet import codec
from limpet.clock import Clock
from limpet.codec import Stored
from limpet.commit.group import is_fault_of_one
from limpet.commit.receipts import superseded_error
from limpet.engine import Engine
from limpet.engines.redis.connection import ANSWER_S, Line, lay
from limpet.engines.server_engine import CommitResult, ReadResult, ServerEngine, Ticket, request_group
from limpet.errors import (
    Compacted,
    Corrupt,
    InvalidNamespace,
    InvalidValue,
    LimpetError,
    PermissionDenied,
    TypeMismatch,
    Unavailable,
)
from limpet.index import CANDIDATES_MAX, IndexProbe
from limpet.keys import Span, check_namespace
from limpet.model import (
    BEGINNING,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Change,
    Commit,
    Delete,
    Durability,
    Entry,
    Equals,
    Expire,
    Family,
    FieldEquals,
    Filter,
    Guard,
    HeldBy,
    LogPage,
    Patch,
    Put,
    Refusal,
    Revision,
    ScanPage,
    Status,
    Touch,
    Traits,
    Version,
    Window,
    Write,
    fingerprint,
)
from limpet.request_ids import new_request_id
from limpet.transition import recall, remember
from limpet.urls import Address

CONNECT_S: Final = 10.0
LISTEN_MS: Final = 5_000
SLICE_BYTES_MAX: Final = 4_000_000

_KEEP_MS: Final = -1
_NEVER_MS: Final = -2
_ABSENT_NUMBER: Final = -1
_STORE: Final = "limpet:store"
_HEAD: Final = struct.Struct(">6QIHc")
_HEAD_BYTES: Final = _HEAD.size
_head = _HEAD.unpack_from
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[int]).decode


async def open(address: Address, clock: Clock) -> Engine:
    """Open ``redis://host:6379/0``; ``rediss:`` is the same over TLS. Any server of a cluster stands for all of it."""
    address.allow("hash_tag", "eviction", "wait")
    braces = address.take("hash_tag", "namespace", ("namespace", "none")) == "namespace"
    evicts = address.take("eviction", "refuse", ("refuse", "allow")) == "allow"
    wait = address.options.get("wait", "0")
    if not wait.isdigit():
        raise InvalidValue(f"{address}: wait is a number of replicas")
    try:
        parts = urlsplit(address.url.partition("?")[0])
    except ValueError as error:
        raise InvalidValue(_unusable(address)) from error

    async def connect(place: tuple[str, int] | None = None) -> RedisEngine:
        login, at, _ = parts.netloc.rpartition("@")
        netloc = parts.netloc if place is None else f"{login}{at}{place[0]}:{place[1]}"
        try:
            pool = _pool(urlunsplit(parts._replace(netloc=netloc)))
        except ValueError as error:
            raise InvalidValue(_unusable(address)) from error
        engine = RedisEngine(pool, str(address), braces=braces, replicas=int(wait))
        try:
            await engine.prepare(evicts=evicts)
            if not engine.in_cluster:
                await engine.name_store()
        except BaseException:
            await engine.close()
            raise
        return engine

    engine = await connect()
    if not engine.in_cluster:
        return engine
    from limpet.engines.redis.cluster import RedisCluster

    cluster = RedisCluster(engine, (parts.hostname or "localhost", parts.port or 6379), connect)
    try:
        if not braces:
            raise InvalidValue(f"{address}: in a cluster the keys of a namespace must have a hash tag")
        await cluster.prepare()
    except BaseException:
        await cluster.close()
        raise
    return cluster


def _unusable(address: Address) -> str:
    return f"{address}: the driver cannot use this URL, look at its host, port and path"


def _pool(url: str) -> Any:
    return ConnectionPool.from_url(
        url,
        socket_connect_timeout=CONNECT_S,
        # We have our own; the driver's way of keeping one can lose a cancellation.
        socket_timeout=None,
        # What the driver sends again by itself could be applied twice.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


@functools.cache
def script() -> tuple[bytes, str]:
    """The script of the server, and the name that the server knows it by."""
    text = Path(__file__).with_name("script.lua").read_bytes()
    return text, hashlib.sha1(text, usedforsecurity=False).hexdigest()


class RedisEngine(ServerEngine):
    """A handle on a Redis server."""

    _reads_at_once = 2
    _commits_at_once = 2

    def __init__(self, pool: Any, display_name: str, *, braces: bool = True, replicas: int = 0) -> None:
        self.traits = Traits(engine="redis", durability="none", log="every", clock="server", inline=False)
        self._pool = pool
        self._braces = braces
        self._replicas = replicas
        self._servers: dict[Line, str] = {}
        self._store_id, self._epoch = "", 1
        self.in_cluster = False
        # Where a lone put is on its way, or the last commits had company.
        self._busy: set[str] = set()
        # Where the last read met something that a plain command cannot tell.
        self._needs_script: set[str] = set()
        super().__init__(self._lay_line, display_name)

    # The eight primitives, but for those that are shared ------------------------

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
    ) -> ScanPage:
        """See `Engine.scan`."""
        self._check_open()
        start = f"[{span.start}" if span.start else "-"
        stop = "+" if span.stop is None else f"({span.stop}"
        is_whole = values or where is not None
        most = SLICE_BYTES_MAX if is_whole else 2**53
        asked = ("scan", family, start, stop, limit, most, int(is_whole))
        cursor, found = await self._run(namespace, *asked)
        pairs = zip(found[::2], found[1::2], strict=True)
        entries = [_entry(key.decode(), text, with_value=is_whole) for key, text in pairs]
        if where is not None:
            entries = [entry for entry in entries if entry.stored is not None and where.matches(entry.stored)]
            entries = entries if values else [entry.without_value() for entry in entries]
        return ScanPage(entries, None if cursor is None else cursor.decode())

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
        if family != "data" or namespace in self._needs_script:
            return await self._read_by_script(namespace, family, keys)
        entries: list[ReadResult] = []
        for key, text in zip(keys, await self._ask("HMGET", self._key(namespace, "data"), *keys), strict=True):
            entry = None if text is None else _entry(key, text)
            if entry is not None and _needs_script(entry):
                self._needs_script.add(namespace)
                return await self._read_by_script(namespace, family, keys)
            entries.append(entry)
        return entries

    async def _read_by_script(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        """Read also what expires, by the server's time, and records with their fields."""
        texts = await self._run(namespace, "read", family, *keys)
        if family == "receipt":
            return [None if kept is None else _receipt(key, kept) for key, kept in zip(keys, texts, strict=True)]
        found = [None if text is None else _entry_or_error(key, text) for key, text in zip(keys, texts, strict=True)]
        if not any(isinstance(one, Entry) and _needs_script(one) for one in found):
            self._needs_script.discard(namespace)
        return found

    async def _read_log(self, namespace: str, after: int, limit: int, span: Span | None) -> LogPage:
        before: str | None = None
        while True:
            asked = ("feed", after, limit, SLICE_BYTES_MAX)
            revision, floor, survived, more, items, told = await self._run(namespace, *asked)
            if after < floor:
                raise Compacted(f"revision {after} was trimmed, the log starts after {floor}", oldest=floor)
            if after > revision:
                raise Compacted(f"revision {after} lies ahead of this store, which is at {revision}")
            if survived is not None:
                raise Compacted(f"the server lost what came after revision {int(survived)}, and {after} with it")
            before = before or _fingerprint(told)
            if not limit:
                return LogPage([], after, before)
            changes = [one for last, item in items for one in _changes(item, last) if one.revision > after]
            is_full = more is not None or len(changes) > limit
            changes = changes[:limit]
            head = changes[-1].revision if is_full else revision
            if span is not None:
                changes = [one for one in changes if one.family == "data" and one.key in span]
            if changes or not is_full:
                return LogPage(changes, head, before)
            after = head

    def _listen_to(self, namespace: str) -> None:
        self._keep_listening(namespace, functools.partial(self._listen, namespace))

    async def _listen(self, namespace: str) -> None:
        """Wake the waiters of a namespace whenever its stream grows."""
        line, log = await self._lay_line(), self._key(namespace, "log")
        try:
            while True:
                newest = await line.ask("XREVRANGE", log, "+", "-", "COUNT", 1)
                # What was missed before is found by looking.
                self._wakeup.notify(namespace)
                after, found = newest[0][0] if newest else "0-0", None
                while not found:
                    found = await line.ask("XREAD", "BLOCK", LISTEN_MS, "COUNT", 1, "STREAMS", log, after)
        finally:
            self._abort(line)

    # Epochs -------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`."""
        await self.skip_revisions(skip)
        return await self.next_epoch()

    async def skip_revisions(self, skip: int) -> None:
        """Leave out so many revisions of every namespace on this server."""
        self._check_open()
        data = self._key("*", "data")
        before, after = (part.encode() for part in data.split("*"))
        cursor = b"0"
        while True:
            cursor, found = await self._ask("SCAN", cursor, "MATCH", data, "COUNT", 1000)
            for key in found:
                name = key.removeprefix(before).removesuffix(after).decode()
                # Another program's key may look like one of ours.
                with contextlib.suppress(InvalidNamespace):
                    await self._run(check_namespace(name), "skip", skip)
            if cursor == b"0":
                return

    async def next_epoch(self) -> int:
        """Begin a new epoch of the store, whose name this server keeps."""
        name, epoch = await self.name_store()
        await self._ask("SET", _STORE, f"{name} {epoch + 1}")
        return (await self.name_store())[1]

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
        asked: list[Any] = []
        for one in wanted:
            texts = [_wire(text) for text in one.texts]
            asked += [one.name, repr(one.low), repr(one.high), int(one.all_texts), len(texts), *texts]
        found = await self._run(namespace, "candidates", CANDIDATES_MAX, *asked)
        return None if found is None else [key for key in map(bytes.decode, found) if key in span]

    # Committing ---------------------------------------------------------------

    def commit(self, namespace: str, batch: Batch) -> Coroutine[Any, Any, Commit | Refusal]:
        """See `Engine.commit`."""
        is_lone = namespace not in self._busy and namespace not in self._commits and not self._replicas
        put = _plain_put(batch) if is_lone else None
        return super().commit(namespace, batch) if put is None else self._put_alone(namespace, batch, put)

    async def _put_alone(self, namespace: str, batch: Batch, put: Put) -> Commit | Refusal:
        """Send a put that has no company from its caller's own task: a worker would take it two turns of the loop more.

        It is finished when its caller is cancelled, and when the engine is closed, as others are.
        """
        self._check_open()
        # First what may fail: from then on there is something to finish.
        body = _put_body([put])
        words, loop = self._words(namespace, "put"), asyncio.get_running_loop()
        answer, finished = loop.create_future(), loop.create_future()
        name, since = new_request_id(), self._latest.get(namespace, 0)

        def finish() -> None:
            self._busy.discard(namespace)
            self._tasks.discard(finished)
            finished.set_result(None)

        def heard(said: Any) -> None:
            self._return_to_pool(line)
            finish()
            if not answer.done():
                answer.set_result(said)

        self._busy.add(namespace)
        self._tasks.add(finished)
        try:
            line = await self._acquire()
        except BaseException:
            finish()
            raise
        line.send((*words, self._servers[line], since, name, body), heard)
        said = await answer
        if isinstance(said, Exception) and self._is_connection_lost(said):
            raise self._ambiguous(f"{name}.1", since, said)
        if isinstance(said, Exception) or said[0] not in (b"put", b"ok"):
            # Nothing was done. What is to be done about that is known there.
            return await super().commit(namespace, batch)
        (outcome,) = await self._put_outcomes(namespace, [put], [batch], said)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _commit_group(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        # Those who had company will have it again, and gather for it.
        (self._busy.add if len(group) > 1 else self._busy.discard)(namespace)
        batches = [ticket.batch for ticket in group]
        puts = [put for batch in batches if (put := _plain_put(batch)) is not None]
        if len(puts) == len(batches):
            return await self._put(namespace, puts, batches, since)
        outcomes: list[CommitResult | None] = [None] * len(group)
        waiting = list(range(len(group)))
        while waiting:
            found: Sequence[CommitResult | Batch]
            try:
                found = await self._commit_batches(namespace, [batches[number] for number in waiting], since)
            except Exception as error:
                if len(waiting) == len(group) and is_fault_of_one(error):
                    raise
                # Those of an earlier look are done, and are told so.
                found = [error] * len(waiting)
            again = []
            for number, outcome in zip(waiting, found, strict=True):
                if isinstance(outcome, Batch):
                    batches[number] = outcome
                elif isinstance(outcome, Refusal) and outcome.guard not in (None, *group[number].batch.guards):
                    # It was looked into, and changed before that could be used.
                    batches[number] = group[number].batch
                else:
                    outcomes[number] = outcome
                    continue
                again.append(number)
            # Only a batch with a guard is looked into again: others changed its key between the look and the commit.
            waiting = again
        return [outcome for outcome in outcomes if outcome is not None]

    async def _put(self, namespace: str, puts: list[Put], batches: list[Batch], since: int) -> Sequence[CommitResult]:
        """Put plain values, the short way if the server finds that it can."""
        name = new_request_id()
        try:
            answer = await self._decide(namespace, "put", name, _put_body(puts))
        except _Lost as error:
            return [self._ambiguous(f"{name}.{number}", since, error.__cause__) for number in range(1, len(puts) + 1)]
        try:
            return await self._put_outcomes(namespace, puts, batches, answer)
        except Exception as error:
            # It was done. An answer that cannot be understood is as good as none.
            return [self._ambiguous(f"{name}.{number}", since, error) for number in range(1, len(puts) + 1)]

    async def _put_outcomes(
        self, namespace: str, puts: list[Put], batches: list[Batch], answer: Any
    ) -> Sequence[CommitResult]:
        if answer[0] == b"put":
            commits = _put_commits(puts, *answer[1:])
            self._record_revision(namespace, commits[-1].revision)
            return commits
        found = await self._outcomes(namespace, batches, answer)
        return [outcome for outcome in found if not isinstance(outcome, Batch)]

    async def _commit_batches(self, namespace: str, batches: list[Batch], since: int) -> list[CommitResult | Batch]:
        """Let the server decide batches. One that it cannot decide comes back, to be asked for again."""
        name = new_request_id()
        causes = [batch.request_id or f"{name}.{number}" for number, batch in enumerate(batches, 1)]
        raw: list[bytes] = []
        body = _pack([_asked(batch, cause, name, raw) for batch, cause in zip(batches, causes, strict=True)])
        try:
            answer = await self._decide(namespace, "commit", name, body, *raw)
        except _Late:
            if len(batches) == 1:
                return [superseded_error()]
            return [one for batch in batches for one in await self._commit_batches(namespace, [batch], since)]
        except _Lost as error:
            return [self._ambiguous(cause, since, error.__cause__) for cause in causes]
        try:
            return await self._outcomes(namespace, batches, answer)
        except Exception as error:
            return [self._ambiguous(cause, since, error) for cause in causes]

    async def _decide(self, namespace: str, verb: str, *parameters: Any) -> Any:
        """What the server answers to a group."""
        seen = self._latest.get(namespace, 0)
        while True:
            sent, answer = False, None
            try:
                async with self._borrow_connection() as line:
                    server = self._servers[line]
                    sent = True
                    answer = await self._call(line, namespace, verb, server, seen, *parameters)
                    if answer[0] in (b"ok", b"put") and self._replicas:
                        await self._await_replicas(line)
            except Exception as error:
                if answer is not None or (sent and self._is_connection_lost(error)):
                    raise _Lost from error
                raise self._translate(error) from error
            if answer[0] == b"late":
                raise _Late
            if answer[0] != b"lost":
                return answer
            seen = await self._mend(namespace, seen)

    async def _outcomes(self, namespace: str, batches: list[Batch], answer: Any) -> list[CommitResult | Batch]:
        _, at_ms, found = answer
        outcomes = [
            await self._outcome(namespace, batch, one, at_ms) for batch, one in zip(batches, found, strict=True)
        ]
        self._record_revision(namespace, max((one.revision for one in outcomes if isinstance(one, Commit)), default=0))
        return outcomes

    async def _outcome(self, namespace: str, batch: Batch, found: list[Any], at_ms: int) -> CommitResult | Batch:
        """What became of a batch."""
        match found[0]:
            case b"done":
                return _commit(batch, found[1], [write.key for write in batch.writes], found[2:], at_ms)
            case b"seen":
                digest, kept_ms, revision, _, *kept = found[1:]
                if digest.decode() != batch.digest.hex():
                    return Refusal("stale_request", batch.request_id or "", None, at_ms)
                keys = [key.decode() for key in kept[::2]]
                return _commit(batch, int(revision), keys, kept[1::2], int(kept_ms), replayed=True)
            case b"again":
                changes = [_change(label, text, int(at)) for label, text, at in found[1:]]
                held: dict[tuple[Family, str], Entry | None] = {}
                for family in {write.family for write in batch.writes}:
                    keys = [write.key for write in batch.writes if write.family == family]
                    entries = await self.read(namespace, keys, family=family)
                    held |= {(family, key): entry for key, entry in zip(keys, entries, strict=True)}
                again = recall(batch, changes, lambda family, key: held.get((family, key)))
                assert again is not None
                return again
            case b"guard":
                guard = batch.guards[found[1] - 1]
                return Refusal("guard", guard.key, _found(batch, guard.key, found[2]), at_ms, guard=guard)
            case b"failed":
                problem = found[1].decode()
                return _from_server(self._display_name, problem)
            case b"foreign":
                place, kind, key = (word.decode() for word in found[1:])
                return TypeMismatch(
                    key,
                    expected="that key to be free: move it away, or use another namespace; taking over such data is "
                    "not supported yet",
                    found=f"a Redis key that Limpet did not write ({kind} {place!r})",
                )
            case b"look":
                return _looked(batch, found[1] - 1, found[2], at_ms)
            case _:
                _, reason, text, needs, size_bytes, place = found
                key = batch.writes[place - 1].key
                return Refusal(
                    reason.decode(), key, _found(batch, key, text), at_ms, needs=needs.decode(), size_bytes=size_bytes
                )

    async def _mend(self, namespace: str, seen: int) -> int:
        """Raise the counter of a server that is another, or that forgot, beyond what anybody has seen of it."""
        try:
            async with self._borrow_connection() as line:
                revision: int = await self._call(line, namespace, "mend", self._servers[line], seen)
        except Exception as error:
            raise self._translate(error) from error
        self._wakeup.notify(namespace)
        return min(seen, revision)

    async def _await_replicas(self, line: Line) -> None:
        reached = await line.ask("WAIT", self._replicas, int(1000 * ANSWER_S / 2))
        if reached < self._replicas:
            raise TimeoutError(f"{reached} of {self._replicas} replicas have it")

    # Connections --------------------------------------------------------------

    async def prepare(self, *, evicts: bool = False) -> None:
        """Look at the server: whether it may serve, and what its writes survive."""
        try:
            async with self._borrow_connection() as line:
                role = await self._info(line, "replication", "role")
                self.in_cluster = await self._info(line, "cluster", "cluster_enabled") == "1"
                if role != "master" and not self.in_cluster:
                    raise Unavailable(f"{self._display_name} is a replica, which takes no writes")
                policy = await self._info(line, "memory", "maxmemory_policy")
                limit = await self._info(line, "memory", "maxmemory")
                appends = await self._info(line, "persistence", "aof_enabled") == "1"
                # A role that may not ask is told what Redis does by default.
                sync = await self._setting(line, "appendfsync", "everysec") if appends else "no"
                if sync == "always" and await self._setting(line, "no-appendfsync-on-rewrite", "no") == "yes":
                    sync = "no"
        except Exception as error:
            raise self._translate(error) from error
        if policy.startswith("allkeys") and limit != "0" and not evicts:
            raise InvalidValue(
                f"{self._display_name} forgets keys when its memory is full (maxmemory-policy {policy}): "
                "set noeviction, or give ?eviction=allow"
            )
        self.traits = msgspec.structs.replace(self.traits, durability=_durability(appends, sync, self._replicas))

    async def name_store(self) -> tuple[str, int]:
        """The name of the store, and its epoch. Of several who find none, one gives it."""
        found = await self._ask("GET", _STORE)
        if found is None:
            await self._ask("SET", _STORE, os.urandom(8).hex(), "NX")
            found = await self._ask("GET", _STORE)
        # The first epoch is not written.
        name, _, epoch = found.decode().partition(" ")
        self._store_id, self._epoch = name, int(epoch or 1)
        return self._store_id, self._epoch

    async def _lay_line(self) -> Line:
        line = await lay(self._pool.make_connection())
        try:
            self._servers[line] = await self._info(line, "replication", "master_replid")
        except BaseException:
            self._abort(line)
            raise
        return line

    async def _info(self, line: Line, section: str, name: str) -> str:
        text: bytes = await line.ask("INFO", section)
        for row in text.decode().splitlines():
            key, _, value = row.partition(":")
            if key == name:
                return value
        return ""

    async def _setting(self, line: Line, name: str, default: str) -> str:
        """A setting of the server, or the default for a role that may not ask."""
        try:
            found = await line.ask("CONFIG", "GET", name)
        except exceptions.ResponseError:
            return default
        return found[1].decode() if found else default

    async def _ask(self, *words: Any) -> Any:
        """Say a command that may be said again."""
        try:
            async with self._borrow_connection() as line:
                return await line.ask(*words)
        except Exception as error:
            raise self._translate(error) from error

    async def _run(self, namespace: str, *parameters: Any) -> Any:
        """Call the script for something that may be asked again."""
        try:
            async with self._borrow_connection() as line:
                return await self._call(line, namespace, *parameters)
        except Exception as error:
            raise self._translate(error) from error

    async def _call(self, line: Line, namespace: str, verb: str, *parameters: Any) -> Any:
        words = self._words(namespace, verb, *parameters)
        try:
            return await line.ask(*words)
        except exceptions.NoScriptError:
            return await line.ask("EVAL", script()[0], *words[2:])

    def _words(self, namespace: str, verb: str, *parameters: Any) -> tuple[Any, ...]:
        """A call of the script as the server takes it."""
        return "EVALSHA", script()[1], "1", self._key(namespace, "data"), verb, self._prefix(namespace), *parameters

    def _key(self, namespace: str, name: str) -> str:
        if self._braces:
            return f"limpet:{{{namespace}}}:{name}"
        if namespace == "limpet":
            raise InvalidValue("without a hash tag no namespace may be called 'limpet', as our own keys are")
        return f"limpet:{namespace}:{name}"

    def _prefix(self, namespace: str) -> str:
        return f"{{{namespace}}}:" if self._braces else f"{namespace}:"

    async def _disconnect(self, connection: Line) -> None:
        self._abort(connection)
        # The transport closes its socket in the next turn of the loop, which may be the last.
        await asyncio.sleep(0)

    def _abort(self, connection: Line) -> None:
        self._servers.pop(connection, None)
        connection.cut()

    def _is_closed(self, connection: Line) -> bool:
        return connection.is_cut

    def _is_connection_lost(self, error: BaseException) -> bool:
        if isinstance(error, exceptions.ResponseError | exceptions.ReadOnlyError | exceptions.BusyLoadingError):
            return False
        return isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError | TimeoutError)

    def _translate_driver_error(self, error: Exception) -> Exception:
        display_name = self._display_name
        match error:
            case exceptions.AuthenticationError() | exceptions.NoPermissionError():
                return PermissionDenied(f"{display_name}: {error}")
            case exceptions.AskError():
                return Unavailable(f"{display_name}: the namespace has moved to another server of the cluster")
            case exceptions.ReadOnlyError() | exceptions.BusyLoadingError() | exceptions.OutOfMemoryError():
                return Unavailable(f"{display_name}: {error}")
            case exceptions.ResponseError():
                problem = str(error)
                # It stays the cause of ours, and whoever logs that prints it.
                error.args = (_without_arguments(problem),)
                return _from_server(display_name, problem)
            case exceptions.RedisError() | OSError() | TimeoutError():
                return Unavailable(f"{display_name} cannot be reached now: {type(error).__name__}")
            case _:
                return error


_FORBIDDEN: Final = re.compile(r"\b(NOPERM|NOAUTH|WRONGPASS)\b|ACL failure|The user executing the script can't")
_PASSING: Final = re.compile(
    r"\b(LOADING|BUSY|CLUSTERDOWN|MASTERDOWN|TRYAGAIN|NOREPLICAS|OOM|MISCONF|READONLY|NOSCRIPT|MOVED|ASK|UNKILLABLE)\b"
)
# Another type in the place of one of our keys, or something in one that the script cannot read.
_FOREIGN: Final = re.compile(r"\bWRONGTYPE\b|user_script|Error running script")


def _from_server(display_name: str, problem: str) -> LimpetError:
    """What the server says, by the words in it that stay the same. A script hands on what its commands are told.

    What is not known here is Unavailable, as is a command that an operator took away.
    """
    text = f"{display_name}: {_without_arguments(problem)}"
    if _FORBIDDEN.search(problem):
        return PermissionDenied(text)
    return Corrupt(text) if _FOREIGN.search(problem) and not _PASSING.search(problem) else Unavailable(text)


def _without_arguments(problem: str) -> str:
    """What the server says, without the arguments of a command that it does not know: they may be values."""
    return problem.partition(", with args")[0]


def _durability(appends: bool, sync: str, replicas: int) -> Durability:
    if not appends:
        return "none"
    if sync == "everysec":
        # While a sync is under way in the background, Redis answers before it has written its file, for up to two
        # seconds. By "no" it writes before it answers, and only never syncs.
        return "seconds"
    if sync != "always":
        return "process"
    return "quorum" if replicas else "disk"


class _Lost(Exception):
    """The line broke while a group was on it."""


class _Late(Exception):
    """One of a group comes after its own retry, and nothing of the group was done."""


# What is asked ------------------------------------------------------------------


def _asked(batch: Batch, cause: str, group: str, raw: list[bytes]) -> list[Any]:
    """A batch as the script takes it. Nothing in it is None, which would be a hole in a table there.

    Its unpacker knows text alone. Bytes that are none go beside it, and in their place stands which they are.
    """

    def text(item: bytes) -> str | int:
        try:
            return item.decode()
        except UnicodeDecodeError:
            raw.append(item)
            return len(raw)

    def fields(held: Mapping[str, bytes]) -> list[str | int]:
        return [item for name, field in held.items() for item in (name, text(_wire(field)))]

    def value(stored: Stored) -> tuple[str, Any]:
        if not isinstance(stored, bytes):
            return "r", fields(stored)
        return ("b", text(stored[1:])) if stored[:1] == b"\0" else ("j", stored.decode())

    def guarded(guard: Guard) -> list[Any]:
        place = [guard.family, guard.key]
        match guard.condition:
            case Version(number):
                return [*place, "version", _number(number), ""]
            case Revision(number):
                return [*place, "revision", _number(number), ""]
            case HeldBy(token):
                return [*place, "held", _number(token), ""]
            case Equals(stored):
                return [*place, "equals", *value(stored)]
            case FieldEquals(name, expected):
                return [*place, "field", text(_wire(expected)) if isinstance(expected, bytes) else False, name]
            case condition:
                return [*place, "present" if condition is PRESENT else "absent", "", ""]

    def written(write: Write) -> list[Any]:
        place = [write.family, write.key]
        match write:
            case Put():
                size_bytes = codec.size_bytes(write.stored)
                return ["put", *place, *value(write.stored), size_bytes, _ttl(write.ttl_ms), _meta(write.meta_json)]
            case Add():
                return ["add", *place, str(write.by), _ttl(write.ttl_ms), _meta(write.meta_json)]
            case Patch():
                how = [list(write.unset), write.if_exists, batch.value_bytes_max]
                return ["patch", *place, fields(write.fields), *how, _ttl(write.ttl_ms), _meta(write.meta_json)]
            case Touch():
                return ["touch", *place, _ttl(write.ttl_ms)]
            case Delete():
                return ["delete", *place, write.take]
            case Expire():
                return ["expire", *place, write.revision]

    since = -1 if batch.retry_since is None else batch.retry_since
    name = request_group(batch.request_id) if since >= 0 and batch.request_id else group
    guards, writes = [guarded(guard) for guard in batch.guards], [written(write) for write in batch.writes]
    digest = batch.digest.hex()
    return [digest, batch.receipt_ms or 0, batch.request_id or "", cause, since, name, guards, writes, batch.is_brief]


def _plain_put(batch: Batch) -> Put | None:
    """The put that is all of a batch, if the script has a short way for it: a JSON value and nothing else."""
    if batch.guards or batch.request_id is not None or len(batch.writes) != 1:
        return None
    put = batch.writes[0]
    if type(put) is not Put or put.ttl_ms is not None or put.meta_json is not None or put.family != "data":
        return None
    return put if isinstance(put.stored, bytes) and put.stored[:1] != b"\0" else None


def _put_body(puts: list[Put]) -> bytes:
    """Plain puts as the script takes them."""
    return _pack([[put.key for put in puts], [put.stored.decode() for put in puts]])  # type: ignore[union-attr]


def _number(number: int) -> int:
    """A number that no entry has, for one that the script could not hold exactly."""
    return number if 0 <= number < 2**53 else _ABSENT_NUMBER


def _ttl(ttl_ms: Any) -> int:
    found: int = _NEVER_MS if ttl_ms is None else _KEEP_MS if ttl_ms is KEEP else ttl_ms
    return found


def _meta(meta_json: Any) -> str | bool:
    found: str | bool = "" if meta_json is None else True if meta_json is KEEP else meta_json.decode()
    return found


# In a hash of Redis, a field of raw bytes is itself, so that other programs read what they expect.
# A JSON field has a zero byte in front, and so have raw bytes that begin with one.


def _wire(field: bytes) -> bytes:
    if field[:1] != b"\0":
        return b"\0" + field
    return field if field[1:2] == b"\0" else field[1:]


def _unwire(wire: bytes) -> bytes:
    if wire[:1] != b"\0":
        return b"\0" + wire
    return wire if wire[1:2] == b"\0" else wire[1:]


# What is answered ---------------------------------------------------------------


def _entry(key: str, text: bytes, *, with_value: bool = True) -> Entry:
    """An entry of its text: its head, its meta, its value."""
    version, revision, created, created_ms, updated_ms, expires_ms, _, meta_bytes, kind = _head(text)
    at = _HEAD_BYTES + meta_bytes
    meta = text[_HEAD_BYTES:at] if meta_bytes else None
    stored = _stored(kind, text[at:]) if with_value else None
    return Entry(key, stored, version, revision, created, created_ms, updated_ms, expires_ms or None, meta)


def _entry_or_error(key: str, found: bytes | list[bytes]) -> Entry | Exception:
    """An entry; or why there is none, where somebody else has written over a record."""
    if isinstance(found, bytes):
        return _entry(key, found)
    return Corrupt(f"another program has written over the record {key!r}: {found[0].decode()}")


def _stored(kind: bytes, value: bytes) -> Stored:
    if kind == b"j":
        return value
    if kind == b"b":
        return b"\0" + value
    fields: dict[str, bytes] = {}
    at, name = 0, None
    while at < len(value):
        colon = value.index(b":", at)
        end = colon + 1 + int(value[at:colon])
        piece, at = value[colon + 1 : end], end
        if name is None:
            name = piece.decode()
        else:
            fields[name], name = _unwire(piece), None
    return fields


def _needs_script(entry: Entry) -> bool:
    """Whether it takes more than its text to tell what an entry is: the server's time, or the hash of a record."""
    return entry.expires_ms is not None or not isinstance(entry.stored, bytes)


def _found(batch: Batch, key: str, text: bytes | None) -> Entry | None:
    """What a refusal tells of a key. To a brief batch, a record is told without its fields."""
    entry = None if text is None else _entry(key, text)
    return entry.without_value() if entry is not None and batch.is_brief and entry.kind == "record" else entry


def _changes(item: list[bytes], last: int) -> Iterator[Change]:
    """The changes of an item of the log, the last of which has this revision."""
    at_ms = int(item[1])
    if item[2] != b"puts":
        return (_change(label, text, at_ms) for label, text in zip(item[2::2], item[3::2], strict=True))
    call, first = item[3].decode(), last - len(item) // 2 + 2
    puts = enumerate(zip(item[4::2], item[5::2], strict=True), 1)
    return (
        Change("put", _entry(key.decode(), text), first + number, first + number, at_ms, f"{call}.{number}", "data")
        for number, (key, text) in puts
    )


def _change(label: bytes, text: bytes, at_ms: int) -> Change:
    op, revision, last, family, cause_bytes, names = label.split(b" ", 5)
    at = int(cause_bytes)
    word: Any = "delete" if op == b"take" else op.decode()
    entry = _entry(names[at:].decode(), text, with_value=op in (b"put", b"patch", b"take"))
    place: Any = family.decode()
    return Change(word, entry, int(revision), int(last), at_ms, names[:at].decode() or None, place)


def _fingerprint(told: list[bytes] | None) -> str:
    """The fingerprint of a change, of its label, the head of its entry and its time."""
    return BEGINNING if told is None else fingerprint(_change(told[0], told[1], int(told[2])))


def _commit(
    batch: Batch, revision: int, keys: list[str], found: list[bytes], at_ms: int, *, replayed: bool = False
) -> Commit:
    """The commit of a batch: for each write, the entry after it or the one that it ended."""
    entries: list[Entry | None] = []
    ended: list[Entry | None] = []
    for write, key, text in zip(batch.writes, keys, found, strict=True):
        after = before = None
        if text[:1] == b"=":
            assert isinstance(write, Put)
            after = msgspec.structs.replace(_entry(key, text[1:], with_value=False), stored=write.stored)
        elif text[:1] in (b"+", b"^"):
            after = _entry(key, text[1:], with_value=text[:1] == b"+")
        elif text:
            before = _entry(key, text[1:], with_value=text[:1] == b"~")
        entries.append(after)
        ended.append(before)
    return Commit(revision, tuple(entries), tuple(ended), at_ms, replayed)


def _put_commits(puts: list[Put], at_ms: int, revision: int, packed: bytes) -> list[Commit]:
    """The commits of puts that came one after the other."""
    numbers = _unpack(packed)
    commits = []
    for put, version, created, created_ms in zip(puts, numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        revision += 1
        entry = Entry(put.key, put.stored, version, revision, created, created_ms, at_ms, None, None)
        commits.append(Commit(revision, (entry,), (None,), at_ms))
    return commits


def _receipt(key: str, kept: list[bytes]) -> Entry:
    """A receipt as other engines keep it."""
    digest, at_ms, revision, until_ms, *rest = kept
    entries: list[Entry | None] = []
    ended: list[Entry | None] = []
    for name, text in zip(rest[::2], rest[1::2], strict=True):
        whole = _entry(name.decode(), text[1:], with_value=text[:1] in (b"+", b"~")) if text else None
        entries.append(whole if text[:1] in (b"=", b"+") else None)
        ended.append(whole if text[:1] in (b"-", b"~") else None)
    commit = Commit(int(revision), tuple(entries), tuple(ended), int(at_ms))
    return remember(key, bytes.fromhex(digest.decode()), commit, int(until_ms) - int(at_ms))


def _looked(batch: Batch, place: int, text: bytes, at_ms: int) -> Batch | Refusal:
    """A batch whose guard asks for a member of a JSON object: refused, or asked for again of this very entry."""
    guard = batch.guards[place]
    entry = _entry(guard.key, text)
    assert isinstance(guard.condition, FieldEquals)
    assert entry.stored is not None
    found, expected = codec.member(entry.stored, guard.condition.name), guard.condition.stored
    if found != (expected if isinstance(expected, bytes) else None):
        return Refusal("guard", guard.key, entry, at_ms, guard=guard)
    guards = [*batch.guards]
    guards[place] = Guard(guard.key, Revision(entry.revision), guard.family)
    return msgspec.structs.replace(batch, guards=tuple(guards))
