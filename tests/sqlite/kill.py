"""Kills writers with SIGKILL at chosen moments, and checks what they left in the file.

    python -m tests.sqlite.kill --kills 200

Each round forks one or two writers on the same file. They write in bursts, by 64 tasks of the asynchronous
API or 8 threads of the sync API, and report over a pipe what they request and what was acknowledged. In
shared memory they mark the phase they are in, so that the parent can choose its moment and still knows it after the
process has ended.

Then the file is opened again and must hold what was acknowledged, all of it and each of it once; nothing by
halves; no revision used twice over all the rounds. What was under way under a request id is retried.

The rows are read with plain SQL, so that the engine does not check itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import json
import mmap
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

import limpet
import limpet.sync
from limpet.engines.sqlite import checkpoints, connections
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.group import GroupWriter
from limpet.errors import Conflict
from limpet.model import Commit

TASKS = 64
THREADS = 8
LINGER_S = 1.0

OPENING = "while opening"
IDLE = "idle"
QUEUED = "queued, not begun"
WITHIN = "between BEGIN and COMMIT"
COMMITTING = "in COMMIT"
UNACKNOWLEDGED = "committed, not acknowledged"
PHASES = (OPENING, IDLE, QUEUED, WITHIN, COMMITTING, UNACKNOWLEDGED)
CRITICAL = (WITHIN, COMMITTING, UNACKNOWLEDGED)
# Most kills go where they hurt. None: at any moment, even before the file is opened.
TARGETS = (WITHIN, COMMITTING, UNACKNOWLEDGED, COMMITTING, UNACKNOWLEDGED, QUEUED, IDLE, None)


# What the writers do ----------------------------------------------------------

Kind = Literal["put", "add", "group", "delete", "doomed"]


class Operation(msgspec.Struct, frozen=True):
    """One write, made from its id alone, so that writer and judge make the same."""

    id: str
    kind: Kind
    number: int
    has_request_id: bool
    padding: int

    @classmethod
    def of(cls, seed: int, id: str) -> Operation:
        dice = random.Random(f"{seed}/{id}")
        kind: Kind = dice.choices(("put", "add", "group", "delete", "doomed"), (30, 25, 25, 12, 8))[0]
        return cls(id, kind, dice.randrange(8), dice.random() < 0.4, dice.choice((0, 10, 200, 3_000)))

    def draft(self, store: Any) -> Any:
        draft = store.batch(request_id=self.id if self.has_request_id else None)
        value, meta, number = {"padding": "x" * self.padding}, {"op": self.id}, self.number
        match self.kind:
            case "put":
                return draft.put(f"single/{number}", value, meta=meta)
            case "add":
                return draft.add(f"counter/{number}", 1, meta=meta)
            case "group":
                draft.put(f"group/{number}/first", value, meta=meta).put(f"group/{number}/second", value, meta=meta)
                return draft.add(f"group/{number}/count", 1, meta=meta)
            case "delete":
                return draft.delete(f"single/{number}")
            case "doomed":
                return draft.put("recoverable", value, meta=meta).expect("never", limpet.PRESENT)


def acknowledgement(commit: Commit) -> dict[str, Any]:
    """The parts of a commit that are compared with the file."""
    made = [None if entry is None else [entry.key, entry.revision, entry.version] for entry in commit.entries]
    ended = [None if entry is None else entry.key for entry in commit.ended]
    return {"revision": commit.revision, "made": made, "ended": ended}


class PhaseMarks:
    """Shared memory that survives its writer: one byte for the engine, and one for each caller."""

    SIZE = 1 + TASKS

    def __init__(self) -> None:
        self.bytes = mmap.mmap(-1, self.SIZE)

    @property
    def phase(self) -> str:
        marks = self.bytes[: self.SIZE]
        match marks[0], 2 in marks[1:], 1 in marks[1:]:
            case 0, _, _:
                return OPENING
            case 2, _, _:
                return WITHIN
            case 3, _, _:
                return COMMITTING
            case _, True, _:
                return UNACKNOWLEDGED
            case _, _, True:
                return QUEUED
            case _:
                return IDLE


class Writer:
    """Runs in the forked process, until it is killed."""

    def __init__(self, url: str, seed: int, name: str, pipe: int, marks: PhaseMarks) -> None:
        self.url, self.seed, self.name = url, seed, name
        self._pipe = pipe
        self._marks = marks.bytes
        # Kills must fall into checkpoints, too.
        checkpoints.PAGES = 20
        self._dice = random.Random(f"{seed}/{name}")
        self._slot: contextvars.ContextVar[int] = contextvars.ContextVar("slot")
        self._slots: dict[str, int] = {}
        self._group: list[Any] = []
        self._count = iter(range(1_000_000_000))
        self._mark_phases()

    def _mark_phases(self) -> None:
        """Have the engine of this process mark the phase that it is in."""
        marks, writer = self._marks, self
        commit, commit_group = SqliteEngine.commit, GroupWriter._commit_group

        class Marking(connections.Connection):
            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
                if not writer._group or sql not in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
                    return super().execute(sql, parameters)
                if sql != "BEGIN IMMEDIATE":
                    marks[0] = 3
                cursor = super().execute(sql, parameters)
                if sql != "BEGIN IMMEDIATE":
                    for ticket in writer._group:
                        marks[writer._slots[ticket.batch.request_id]] = 2
                marks[0] = 2 if sql == "BEGIN IMMEDIATE" else 1
                return cursor

        async def marking_commit(engine: Any, namespace: str, batch: Any) -> Any:
            writer._slots[batch.request_id] = writer._slot.get()
            return await commit(engine, namespace, batch)

        def marking_group(engine: Any, group: list[Any]) -> Any:
            writer._group = group
            try:
                return commit_group(engine, group)
            finally:
                writer._group = []

        connections.Connection = Marking  # type: ignore[misc]
        SqliteEngine.commit = marking_commit  # type: ignore[assignment, method-assign]
        GroupWriter._commit_group = marking_group  # type: ignore[assignment, method-assign]

    def report(self, word: str, id: str, reply: Any = None) -> None:
        os.write(self._pipe, json.dumps([word, id, reply]).encode() + b"\n")

    def next_operation(self, slot: int) -> Operation:
        operation = Operation.of(self.seed, f"{self.name}.{next(self._count)}")
        self.report("request", operation.id)
        self._slot.set(slot)
        self._marks[slot] = 1
        return operation

    def done(self, slot: int, operation: Operation, commit: Commit | None) -> None:
        if commit is None:
            self.report("refused", operation.id)
        else:
            self.report("acknowledged", operation.id, acknowledgement(commit))
        self._marks[slot] = 0

    async def by_tasks(self) -> None:
        async with limpet.open(self.url, sweep=False) as store:
            self._marks[0] = 1

            async def some(slot: int) -> None:
                for _ in range(3):
                    operation = self.next_operation(slot)
                    try:
                        self.done(slot, operation, await operation.draft(store).commit())
                    except Conflict:
                        self.done(slot, operation, None)

            while True:
                await asyncio.gather(*(some(slot) for slot in range(1, TASKS + 1)))
                await asyncio.sleep(self._dice.random() * 0.004)

    def by_threads(self) -> None:
        store = limpet.sync.open(self.url, sweep=False)
        self._marks[0] = 1

        def work(slot: int) -> None:
            dice = random.Random(f"{self.seed}/{self.name}/{slot}")
            while True:
                for _ in range(3):
                    operation = self.next_operation(slot)
                    try:
                        self.done(slot, operation, operation.draft(store).commit())
                    except Conflict:
                        self.done(slot, operation, None)
                time.sleep(dice.random() * 0.004)

        for slot in range(2, THREADS + 1):
            threading.Thread(target=work, args=(slot,), daemon=True).start()
        work(1)


Api = Literal["tasks", "threads"]


class Running:
    """A forked writer as its parent sees it."""

    def __init__(self, url: str, seed: int, name: str, api: Api) -> None:
        self.marks = PhaseMarks()
        self._pipe, writing = os.pipe()
        self._received = bytearray()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                writer = Writer(url, seed, name, writing, self.marks)
                if api == "tasks":
                    asyncio.run(writer.by_tasks())
                else:
                    writer.by_threads()
            except BaseException as error:
                print(f"writer {name} failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        os.close(writing)
        os.set_blocking(self._pipe, False)

    def listen(self) -> None:
        """Take what the pipe holds, so that the writer never waits for us."""
        with contextlib.suppress(BlockingIOError):
            while received := os.read(self._pipe, 65_536):
                self._received += received

    def has_acknowledged(self) -> bool:
        return b"acknowledged" in self._received

    def kill(self) -> tuple[str, list[Any]]:
        """End it now. Returns the phase in which it died, and all it reported."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit("a writer ended by itself")
        os.set_blocking(self._pipe, True)
        while received := os.read(self._pipe, 65_536):
            self._received += received
        os.close(self._pipe)
        phase = self.marks.phase
        self.marks.bytes.close()
        # A line that was cut off was never reported.
        return phase, [json.loads(line) for line in self._received.split(b"\n")[:-1]]


def wait_for_moment(running: list[Running], target: str | None, dice: random.Random) -> None:
    """Let the writers write for a while, then wait until the first of them is where we want it."""
    victim = running[0]
    begun = time.monotonic()
    while time.monotonic() < begun + LINGER_S and target is not None and not victim.has_acknowledged():
        listen(running)
    moment = time.monotonic() + dice.random() * 0.05
    while time.monotonic() < moment:
        listen(running)
    give_up = time.monotonic() + LINGER_S
    while target is not None and victim.marks.phase != target and time.monotonic() < give_up:
        listen(running)


def listen(running: Iterable[Running]) -> None:
    for writer in running:
        writer.listen()


# What must be true afterwards -------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """A change in the log."""

    revision: int
    last_revision: int
    op: str
    cause: str | None
    key: str
    value: str | None
    version: int
    entry_revision: int
    created_revision: int
    operation: str | None


_ROWS = (
    "SELECT revision, last_revision, op, cause, key, value, version, entry_revision, created_revision,"
    " json_extract(meta, '$.op') FROM limpet_changes WHERE namespace = 'default' AND revision > ? ORDER BY revision"
)
_ENTRIES = (
    "SELECT key, value, version, revision, created_revision FROM limpet_entries"
    " WHERE namespace = 'default' AND family = 'data'"
)
_COUNTED = (
    "SELECT (SELECT max(revision) FROM limpet_changes), count(*),"
    " sum(length(CAST(key AS BLOB)) + length(CAST(value AS BLOB))), (SELECT count(*) FROM limpet_changes),"
    " (SELECT sum(size_bytes) FROM limpet_changes) FROM limpet_entries WHERE family = 'data'"
)
_COUNTERS = "SELECT revision, keys, size_bytes, log_changes, log_bytes FROM limpet_counters WHERE namespace = 'default'"


class Judge:
    """Remembers everything that was ever requested, acknowledged and found, and compares the file with it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.operations: dict[str, Operation] = {}
        self.acknowledged: dict[str, dict[str, Any]] = {}
        self.refused: set[str] = set()
        self.log: dict[int, Row] = {}
        self.applied: dict[str, int] = {}
        self.receipts: set[str] = set()
        self.repeated: Counter[str] = Counter()
        self._head = 0
        self._state: dict[str, Row] = {}
        self._counts: Counter[str] = Counter()
        self._owners: dict[int, str] = {}

    def take(self, words: Iterable[tuple[str, str, Any]]) -> None:
        for word, id, reply in words:
            if word == "request":
                self.operations[id] = Operation.of(self.seed, id)
            elif word == "refused":
                self.refused.add(id)
            else:
                self._acknowledge(id, reply)

    def _acknowledge(self, id: str, reply: dict[str, Any]) -> None:
        self.acknowledged[id] = reply
        for made in reply["made"]:
            if made is not None:
                owner = self._owners.setdefault(made[1], id)
                assert owner == id, f"revision {made[1]} was given to {owner} and to {id}"

    # The file, read as rows -----------------------------------------------------

    def read_rows(self, *, from_start: bool = False) -> None:
        """Read the log from where we left it, and compare it with all that is known."""
        with contextlib.closing(sqlite3.connect(self.path)) as rows:
            assert rows.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            if not rows.execute("SELECT 1 FROM sqlite_master WHERE name = 'limpet_store'").fetchone():
                assert not self.acknowledged, "the file is empty"
                return
            fresh = [Row(*row) for row in rows.execute(_ROWS, (0 if from_start else self._head,))]
            if from_start:
                assert fresh == [*self.log.values()], "the log of earlier rounds was rewritten"
                return
            self._follow(fresh)
            self._compare_entries(rows)
            self._compare_receipts(rows)
            counters = rows.execute(_COUNTERS).fetchone()
            assert counters == rows.execute(_COUNTED).fetchone() or (counters is None and not self.log)
        self._compare_acknowledgements()

    def _follow(self, fresh: list[Row]) -> None:
        """Each change fits what was there before it, and a commit is one operation, whole."""
        commits: dict[int, list[Row]] = {}
        for row in fresh:
            assert row.revision > self._head, f"revision {row.revision} is used twice"
            self._head = row.revision
            before = self._state.get(row.key)
            if row.op == "delete":
                assert before is not None
                assert row.version == before.version
                del self._state[row.key]
            else:
                assert (row.version, row.entry_revision) == (1 if before is None else before.version + 1, row.revision)
                assert row.created_revision == (row.revision if before is None else before.created_revision)
                self._state[row.key] = row
                if row.key.startswith("counter/") or row.key.endswith("/count"):
                    self._counts[row.key] += 1
                    assert row.value == str(self._counts[row.key]), f"{row.key} does not count its writes"
            self.log[row.revision] = row
            commits.setdefault(row.last_revision, []).append(row)
        for last_revision, changes in commits.items():
            self._check_whole(last_revision, changes)

    def _check_whole(self, last_revision: int, changes: list[Row]) -> None:
        first = changes[0]
        assert changes[-1].revision == last_revision
        ids = {row.operation for row in changes}
        assert len(ids) == 1, f"the commit of revision {last_revision} mixes {ids}"
        id = first.cause if first.op == "delete" else first.operation
        if first.op == "delete":
            # Only a delete under a request id shows whose it was.
            expected = [first.key] if first.key.startswith("single/") else []
        else:
            assert id is not None
            operation = self.operations[id]
            expected = {
                "put": [f"single/{operation.number}"],
                "add": [f"counter/{operation.number}"],
                "group": [f"group/{operation.number}/{part}" for part in ("first", "second", "count")],
                "delete": [],
                "doomed": [],
            }[operation.kind]
        assert [row.key for row in changes] == expected, f"{id} is applied by halves, or was never requested"
        if id in self.operations:
            assert id not in self.applied, f"{id} is applied twice"
            self.applied[id] = last_revision

    def _compare_entries(self, rows: sqlite3.Connection) -> None:
        found = {row[0]: row[1:] for row in rows.execute(_ENTRIES)}
        logged = {
            key: (row.value, row.version, row.entry_revision, row.created_revision) for key, row in self._state.items()
        }
        assert found == logged, "the entries differ from the log"

    def _compare_receipts(self, rows: sqlite3.Connection) -> None:
        self.receipts = {key for (key,) in rows.execute("SELECT key FROM limpet_entries WHERE family = 'receipt'")}
        due = {id for id in self.applied if self.operations[id].has_request_id}
        assert due <= self.receipts, f"{due - self.receipts} are applied without a receipt"
        # Deleting what is not there leaves a receipt and no change.
        for id in self.receipts - due:
            assert self.operations[id].kind == "delete", f"{id} has a receipt and is not applied"

    def _compare_acknowledgements(self) -> None:
        for id, reply in self.acknowledged.items():
            operation = self.operations[id]
            for made in reply["made"]:
                if made is not None:
                    key, revision, version = made
                    row = self.log.get(revision)
                    assert row is not None, f"{id} was acknowledged and is lost"
                    assert (row.key, row.version, row.operation) == (key, version, id)
            if reply["ended"][0] is not None:
                row = self.log.get(reply["revision"])
                assert row is not None, f"{id} was acknowledged and is lost"
                assert (row.op, row.key) == ("delete", reply["ended"][0])
            if operation.has_request_id:
                assert id in self.receipts, f"{id} was acknowledged and its receipt is lost"
        for id in self.refused:
            assert self.operations[id].kind == "doomed"
            assert id not in self.applied

    # The file, opened by a store --------------------------------------------------

    async def repeat(self, ids: Iterable[str]) -> None:
        """Retry under the same ids: what was applied is answered, what was not is applied now."""
        async with limpet.open(f"sqlite:///{self.path}", sweep=False) as store:
            for id in ids:
                operation = self.operations[id]
                earlier = await store.outcome(id)
                assert (earlier is not None) == (id in self.receipts)
                try:
                    commit = await operation.draft(store).commit()
                except Conflict:
                    assert operation.kind == "doomed"
                    self.repeated["refused again"] += 1
                    continue
                reply = acknowledgement(commit)
                if id in self.acknowledged:
                    assert reply == self.acknowledged[id], f"{id} is answered otherwise than at first"
                if id in self.applied:
                    assert commit.revision == self.applied[id]
                assert commit.replayed == (earlier is not None)
                self.repeated["answered" if commit.replayed else "applied now"] += 1
                self._acknowledge(id, reply)

    def under_way(self, round_name: str) -> list[str]:
        """Operations of this round with a request id, without a reply."""
        return [
            id
            for id, operation in self.operations.items()
            if id.startswith(f"{round_name}.")
            and operation.has_request_id
            and id not in self.acknowledged
            and id not in self.refused
        ]


# Rounds -------------------------------------------------------------------------


def rounds(kills: int, dice: random.Random) -> Iterator[tuple[list[Api], str | None]]:
    """Who writes, and when to strike. A round with two writers counts as two kills."""
    apis: list[list[Api]] = [["tasks"], ["threads"], ["tasks", "threads"]]
    number = done = 0
    while done < kills:
        writers = apis[number % len(apis)][: kills - done]
        yield writers, TARGETS[dice.randrange(len(TARGETS))] if number else None
        number, done = number + 1, done + len(writers)


def run(path: Path, kills: int, seed: int) -> Counter[str]:
    """Kill so many writers on one file. Returns how many died in which phase; raises when anything is amiss."""
    dice = random.Random(seed)
    judge = Judge(path, seed)
    phases: Counter[str] = Counter()
    for number, (apis, target) in enumerate(rounds(kills, dice)):
        running = [Running(f"sqlite:///{path}", seed, f"{number}.{index}", api) for index, api in enumerate(apis)]
        wait_for_moment(running, target, dice)
        known = len(judge.acknowledged)
        for writer in running:
            phase, words = writer.kill()
            phases[phase] += 1
            judge.take(words)
        if not path.exists():
            assert not judge.acknowledged
            continue
        judge.read_rows()
        fresh = [id for id in [*judge.acknowledged][known:] if judge.operations[id].has_request_id]
        asyncio.run(judge.repeat([*judge.under_way(str(number)), *dice.sample(fresh, min(len(fresh), 10))]))
        judge.read_rows()
    judge.read_rows(from_start=True)
    report(judge, phases, seed)
    return phases


def report(judge: Judge, phases: Counter[str], seed: int) -> None:
    requested = len(judge.operations)
    answered = len(judge.acknowledged) + len(judge.refused)
    print(f"seed {seed}: {requested:,} writes requested, {answered:,} answered, {len(judge.log):,} changes in the log")
    print("retried:", ", ".join(f"{count} {what}" for what, count in sorted(judge.repeated.items())))
    print(f"{'killed':<30} {'times':>5}")
    for phase in PHASES:
        print(f"{phase:<30} {phases[phase]:>5}")
    print(f"{'between BEGIN and answer':<30} {sum(phases[phase] for phase in CRITICAL):>5} of {phases.total()}")
    print("none lost, none doubled, none by halves, no revision twice")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sqlite.kill", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="how many writers to kill")
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of an earlier run")
    parser.add_argument("--folder", type=Path, default=None, help="where to make the file; a new folder if not given")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    folder = options.folder or Path(tempfile.mkdtemp(prefix="limpet-kill-"))
    print(f"killing {options.kills} writers on {folder}/state.db, seed {seed}", flush=True)
    phases = run(folder / "state.db", options.kills, seed)
    critical = sum(phases[phase] for phase in CRITICAL)
    if critical < options.kills // 4:
        # A run that struck elsewhere proves nothing.
        raise SystemExit(f"void: only {critical} of {options.kills} kills fell between BEGIN and acknowledgement")
    if options.folder is None:
        # A file that failed stays there to be examined.
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
