"""Judges of concurrent histories.

A history is the requests of clients and the replies to them, with the time of each. A `Recorder`
notes it. An operation without a reply may have happened at any time after its call, or not at
all. Every other operation happened at some moment between its call and its return, if the store
is right. Three judges check that. Each returns None, or a text that explains the violation.

- `check_register` searches for an order of the operations of each key that explains all replies,
  by trial (Wing and Gong, with Lowe's cache of states already tried). It assumes nothing about
  revisions, and is for histories of a few hundred operations.
- `check_order` takes the order from the revisions, which are unique and never used again, and only
  has to check that each operation fits there. It judges a whole namespace with its batches, in
  n log n.
- `check_watch` compares what a watch delivered with what was acknowledged.

Values are numbers and strings, and no two puts of a history should write the same value: a judge
could not distinguish them. Keys have no time to live: no client could know when it ended.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal, Protocol

import msgspec

from limpet.model import ABSENT, PRESENT, Entry, Revision, Sentinel, Version

__all__ = ["UNSEEN", "KeyState", "Operation", "Recorder", "check_order", "check_register", "check_watch"]

Kind = Literal["get", "put", "add", "delete", "check"]
"""The kind of an operation. A create is a put that expects ABSENT, a take is a delete that saw a
value, and a check is a guard of a batch on a key that the batch does not write."""

Expected = Literal[Sentinel.ABSENT, Sentinel.PRESENT] | Version | Revision | None


class _Unseen(Enum):
    UNSEEN = "something"

    def __repr__(self) -> str:
        return self.value


UNSEEN: Final = _Unseen.UNSEEN
"""A value that no reply has shown."""


class KeyState(msgspec.Struct, frozen=True):
    """The state of a key, as far as a client could see it. None stands for a number that was not shown."""

    version: int | None = None
    revision: int | None = None
    value: Any = UNSEEN

    @classmethod
    def of(cls, entry: Entry | None) -> KeyState | None:
        """The state that an entry shows."""
        if entry is None:
            return None
        return cls(entry.version, entry.revision, UNSEEN if entry.stored is None else entry.value)

    def __str__(self) -> str:
        return f"{self.value!r} (version {self.version or '?'}, revision {self.revision or '?'})"


class Operation(msgspec.Struct, eq=False):
    """One thing a client did to one key. A batch is several with the same ``call``.

    Attributes:
        argument: The value put, or the step added.
        expect: The guard it carried.
        cause: The request id it carried, by which the log knows it.
        seen: What a get, a delete or a refusal found; None for nothing.
        made: What a put or an add left.
        revision: The revision of a write, if the reply gave it.
    """

    client: str
    key: str
    op: Kind
    call: int
    called: int
    argument: Any = None
    expect: Expected = None
    cause: str | None = None
    returned: int | None = None
    outcome: Literal["unknown", "done", "refused"] = "unknown"
    seen: KeyState | None = None
    made: KeyState | None = None
    revision: int | None = None

    @property
    def writes(self) -> bool:
        """Whether it changed something, or may have."""
        if self.op == "delete":
            return self.outcome == "unknown" or (self.outcome == "done" and self.seen is not None)
        return self.op in ("put", "add") and self.outcome != "refused"

    def __str__(self) -> str:
        request = f"{self.client} {self.op} {self.key!r}"
        if self.op in ("put", "add"):
            request += f" {self.argument!r}"
        if self.expect is not None:
            request += f" expecting {self.expect!r}"
        if self.outcome == "unknown":
            return f"{request} [{self.called}, ?] -> unknown"
        reply = f"left {self.made}" if self.made is not None else f"found {self.seen or 'nothing'}"
        if self.made is None and self.revision is not None:
            reply += f" and became revision {self.revision}"
        refused = "refused, " if self.outcome == "refused" else ""
        return f"{request} [{self.called}, {self.returned}] -> {refused}{reply}"


class Recorder:
    """Notes the requests of clients and the replies to them, from any task or thread.

    Time is a counter, so that no two moments are equal. Processes that write one history
    together need a clock that they share.
    """

    def __init__(self, time: Callable[[], int] | None = None) -> None:
        self.operations: list[Operation] = []
        self._time = time or itertools.count(1).__next__
        self._calls = itertools.count(1)

    def call(
        self,
        client: str,
        key: str,
        op: Kind,
        argument: Any = None,
        *,
        expect: Expected = None,
        cause: str | None = None,
        part_of: Operation | None = None,
    ) -> Operation:
        """Note a call just before it is made. The parts of a batch name its first."""
        number = next(self._calls) if part_of is None else part_of.call
        called = self._time() if part_of is None else part_of.called
        operation = Operation(client, key, op, number, called, argument, expect, cause)
        self.operations.append(operation)
        return operation

    def note_success(
        self,
        operation: Operation,
        *,
        seen: KeyState | None = None,
        made: KeyState | None = None,
        revision: int | None = None,
    ) -> None:
        """Note a success just after its reply. The outcome of an operation without one stays unknown."""
        operation.returned = self._time()
        operation.outcome, operation.seen, operation.made = "done", seen, made
        operation.revision = made.revision if revision is None and made is not None else revision

    def note_refusal(self, operation: Operation, seen: KeyState | None) -> None:
        """Note that a guard did not hold, and what was found."""
        operation.returned = self._time()
        operation.outcome, operation.seen = "refused", seen

    def forget(self, operation: Operation) -> None:
        """Remove a call that certainly was not applied and returned nothing."""
        self.operations.remove(operation)


class Logged(Protocol):
    """The part of a change in the log, or of an event of a watch, that the judges read."""

    @property
    def op(self) -> str:
        """The kind of the change."""
        ...

    @property
    def key(self) -> str:
        """The key."""
        ...

    @property
    def entry(self) -> Entry | None:
        """The entry after it, or the one that ended."""
        ...

    @property
    def revision(self) -> int:
        """The revision of the change."""
        ...

    @property
    def commit(self) -> int:
        """The last revision of its batch."""
        ...

    @property
    def cause(self) -> str | None:
        """The request id of the write."""
        ...


class _Violation(Exception):
    """Raised with an explanation wherever a judge finds a violation."""


# The effect of an operation on a key ------------------------------------------


def _after(state: KeyState | None, op: Operation) -> tuple[KeyState | None, str | None]:
    """The state after an operation that meets this state, and why it cannot have happened there, or None."""
    holds = _holds(op.expect, state)
    if op.outcome == "refused":
        if holds:
            return state, "it was refused although what it expected was there"
        return _observe_state(state, op.seen)
    if holds is False:
        return state, "it was not refused although what it expected was not there"
    if op.op == "check":
        return state, None
    if op.op == "get":
        return _observe_state(state, op.seen)
    if op.op == "delete":
        if op.outcome == "done":
            return None, _observe_state(state, op.seen)[1]
        return None, "there was nothing to delete" if state is None else None
    value = op.argument if op.op == "put" else (0 if state is None else state.value) + op.argument
    left = KeyState(1 if state is None else (state.version or 0) + 1, op.revision, value)
    if op.outcome == "done" and not _agree(left, op.made):
        return left, "it should have left another version or value"
    if state is not None and op.revision is not None and (state.revision or 0) >= op.revision:
        return left, "its revision is not greater than the one before"
    return left, None


def _holds(expect: Expected, state: KeyState | None) -> bool | None:
    """Whether a guard holds; None when there is none, or when the revision is not known."""
    if expect is None:
        return None
    if state is None:
        return expect is ABSENT
    match expect:
        case Version(number):
            return state.version == number
        case Revision(number):
            return None if state.revision is None else state.revision == number
        case _:
            return expect is PRESENT


def _observe_state(state: KeyState | None, seen: KeyState | None) -> tuple[KeyState | None, str | None]:
    """The state after a client saw it. The reply may add the revision, if it was not known."""
    if not _agree(state, seen):
        return state, f"there was {state or 'nothing'}"
    if state is not None and seen is not None and state.revision is None:
        return msgspec.structs.replace(state, revision=seen.revision), None
    return state, None


def _agree(one: KeyState | None, other: KeyState | None) -> bool:
    """Whether two partly known states can be the same state."""
    if one is None or other is None:
        return one is other
    return (
        (one.version is None or other.version is None or one.version == other.version)
        and (one.revision is None or other.revision is None or one.revision == other.revision)
        and (one.value is UNSEEN or other.value is UNSEEN or one.value == other.value)
    )


# The search -------------------------------------------------------------------


def check_register(operations: Iterable[Operation], *, steps_max: int = 1_000_000) -> str | None:
    """Whether each key, taken alone, behaved like one register. For short histories.

    A search that takes more than ``steps_max`` steps for a key is given up and reported: an undecided
    history does not count as right.
    """
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_key[operation.key].append(operation)
    for key, history in sorted(by_key.items()):
        problem = _search(key, history, steps_max)
        if problem is not None:
            return problem
    return None


def _search(key: str, history: list[Operation], steps_max: int) -> str | None:
    """Try orders of one key's operations until one explains all replies.

    The moments of call and return are in a linked list. An operation may be next if no other that
    is still in the list has returned before it was called. Meeting a return means that its
    operation had to come earlier, so the latest choice was wrong. When the same set of operations
    has already led to the same state, in another order, the rest need not be tried again.
    """
    moments = sorted(
        [(op.called, 0, number) for number, op in enumerate(history)]
        + [(op.returned, 1, number) for number, op in enumerate(history) if op.returned is not None]
    )
    following = list(range(1, len(moments) + 2))
    previous = list(range(-1, len(moments) + 1))
    return_of = {number: at for at, (_, is_return, number) in enumerate(moments, 1) if is_return}

    def lift(at: int) -> None:
        following[previous[at]], previous[following[at]] = following[at], previous[at]

    def put_back(at: int) -> None:
        following[previous[at]] = previous[following[at]] = at

    state: KeyState | None = None
    taken: list[tuple[int, KeyState | None]] = []
    done = 0
    tried: set[tuple[int, KeyState | None]] = {(0, None)}
    # Operations of unknown outcome need not have happened: the search ends when all others are explained.
    left = len(return_of)
    deepest: tuple[int, list[int], KeyState | None, Operation] | None = None
    at = following[0]
    for _ in range(steps_max):
        if left == 0:
            return None
        _, is_return, number = moments[at - 1]
        if not is_return:
            after, problem = _after(state, history[number])
            mark = (done | 1 << number, after)
            if problem is not None or mark in tried:
                at = following[at]
                continue
            tried.add(mark)
            taken.append((at, state))
            state, done = after, mark[0]
            lift(at)
            if number in return_of:
                lift(return_of[number])
                left -= 1
            at = following[0]
            continue
        if deepest is None or len(taken) > deepest[0]:
            deepest = len(taken), [moments[index - 1][2] for index, _ in taken], state, history[number]
        if not taken:
            return _describe_failure(key, history, deepest)
        at, state = taken.pop()
        number = moments[at - 1][2]
        done ^= 1 << number
        if number in return_of:
            put_back(return_of[number])
            left += 1
        put_back(at)
        at = following[at]
    return f"key {key!r}: undecided after {steps_max:,} steps. The history is too long, or has too many unknowns."


def _describe_failure(
    key: str, history: list[Operation], deepest: tuple[int, list[int], KeyState | None, Operation]
) -> str:
    count, order, state, stuck = deepest
    shown = [f"  {history[number]}" for number in order[-6:]]
    if count > len(shown):
        shown.insert(0, f"  ... {count - len(shown)} more")
    reason = _after(state, stuck)[1] or "every way to go on from it fails"
    return "\n".join(
        [
            f"key {key!r}: no order of its {len(history)} operations explains their replies. The longest that does:",
            *shown,
            f"leaves {state or 'nothing'}, and then this must come:",
            f"  {stuck}",
            f"but {reason}.",
        ]
    )


# The order of the revisions ---------------------------------------------------


def check_order(operations: Sequence[Operation], log: Iterable[Logged] | None = None) -> str | None:
    """Whether a namespace behaved in the order of its revisions. For histories of any length.

    The revisions put all writes in one order. Each write must fit the state it meets there; the
    writes of a batch must be adjacent; every acknowledged write must have exactly one revision, of
    its own; and each operation must have a moment between its call and its return, in that order,
    such that every client saw the state of its moment.

    Args:
        operations: The history, from an empty namespace on.
        log: All changes of the namespace. It identifies, by their causes, writes whose outcome or revision no reply
            gave. Without a log such writes are not allowed.
    """
    try:
        by_revision = _writes_by_revision(operations, None if log is None else list(log), "in the log")
        _Order(operations, by_revision).judge()
    except _Violation as found:
        return str(found)
    return None


def _writes_by_revision(
    operations: Sequence[Operation], log: Sequence[Logged] | None, where: str
) -> dict[int, Operation]:
    """Each write that happened, by its revision; with a log, both must contain the same changes."""
    caused: dict[tuple[str | None, str], list[int]] = defaultdict(list)
    for change in log or ():
        caused[change.cause, change.key].append(change.revision)
    by_revision: dict[int, Operation] = {}
    for op in operations:
        if not op.writes:
            continue
        found = caused.get((op.cause, op.key), []) if op.cause is not None else []
        if len(found) > 1:
            raise _Violation(f"applied {len(found)} times, at revisions {found}:\n  {op}")
        revision = op.revision or (found[0] if found else None)
        if revision is None:
            if log is None or op.cause is None:
                raise ValueError(f"needs a cause, and the log to look it up, because no reply gave its revision: {op}")
            if op.outcome == "done":
                raise _Violation(f"a lost write, acknowledged and not {where}:\n  {op}")
            continue
        if revision in by_revision:
            raise _Violation(f"two writes have revision {revision}:\n  {by_revision[revision]}\n  {op}")
        by_revision[revision] = op
    if log is not None:
        _compare_with_log(by_revision, log, where)
    return by_revision


def _compare_with_log(by_revision: dict[int, Operation], log: Sequence[Logged], where: str) -> None:
    logged = {change.revision: change for change in log}
    for revision, op in by_revision.items():
        if revision not in logged:
            raise _Violation(f"a lost write, acknowledged at revision {revision} and not {where}:\n  {op}")
    for revision, change in logged.items():
        if revision not in by_revision:
            raise _Violation(f"no client requested revision {revision} {where}: {change.op} of {change.key!r}")
        _compare_change(by_revision[revision], change, where)


def _compare_change(op: Operation, change: Logged, where: str) -> None:
    """A change must agree with the request and with the reply."""
    wanted = "delete" if op.op == "delete" else "put"
    if (change.key, change.op) != (op.key, wanted):
        raise _Violation(f"revision {change.revision} {where} is a {change.op} of {change.key!r}, not this:\n  {op}")
    promised = op.made or (KeyState(value=op.argument) if op.op == "put" else None)
    if promised is not None and not _agree(KeyState.of(change.entry), promised):
        raise _Violation(f"revision {change.revision} {where} holds {KeyState.of(change.entry)}, not this:\n  {op}")


class _Commit:
    """Writes that were applied together, and the moments between which that must have happened."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Operation]] = []
        self.after: float = -math.inf
        self.after_operation: Operation | None = None
        self.before: float = math.inf
        self.point: float = -math.inf
        self.pushed_by: Operation | None = None

    def add(self, revision: int, op: Operation) -> None:
        self.parts.append((revision, op))
        self.follow(op)
        self.before = min(self.before, math.inf if op.returned is None else op.returned)

    def follow(self, op: Operation) -> bool:
        """Let the commit happen no earlier than this call. Returns whether that moves its lower bound."""
        if op.called <= self.after:
            return False
        self.after, self.after_operation = op.called, op
        return True


class _Epoch(msgspec.Struct, frozen=True):
    """A period of a key in one state: from its commit until the commit of the next epoch."""

    number: int
    start: _Commit
    held: KeyState | None


class _Order:
    """A history laid out in the order of its revisions."""

    def __init__(self, operations: Sequence[Operation], by_revision: Mapping[int, Operation]) -> None:
        self._commits = _group_commits(operations, by_revision)
        self._lives = {op.key: [_Epoch(0, _Commit(), None)] for op in operations}
        self._epochs: dict[tuple[str, int], _Epoch] = {}
        self._lay_out(operations)
        applied = {op.call for op in by_revision.values()}
        self._present: list[tuple[Operation, _Epoch]] = []
        self._absent: list[Operation] = []
        for op in operations:
            if op.outcome == "unknown" or (op.call in applied and (op.writes or op.op == "check")):
                continue
            self._observe(op)

    def _lay_out(self, operations: Sequence[Operation]) -> None:
        """Find the epochs of every key, and check each write against the state it meets."""
        checks: dict[int, list[Operation]] = defaultdict(list)
        for op in operations:
            if op.op == "check" and op.outcome == "done":
                checks[op.call].append(op)
        for commit in self._commits:
            for op in checks[commit.parts[0][1].call]:
                _require_fit(*_after(self._lives[op.key][-1].held, op), op, "just before its commit")
            for revision, op in commit.parts:
                life = self._lives[op.key]
                held, problem = _after(life[-1].held, op)
                _require_fit(held, problem, op, f"after {life[-1].held or 'nothing'}")
                if held is not None:
                    held = msgspec.structs.replace(held, revision=revision)
                life.append(_Epoch(len(life), commit, held))
                self._epochs[op.key, revision] = life[-1]

    def _observe(self, op: Operation) -> None:
        """Find out which epoch of its key an operation saw."""
        seen = op.seen
        if op.op == "check" and op.outcome == "done":
            if not isinstance(op.expect, Revision) and op.expect is not ABSENT:
                return
            seen = KeyState(revision=op.expect.number) if isinstance(op.expect, Revision) else None
        if seen is None:
            _require_fit(*_after(None, op), op, "where there was nothing")
            self._absent.append(op)
            return
        if seen.revision is None:
            raise ValueError(f"shows no revision, so its state cannot be identified: {op}")
        epoch = self._epochs.get((op.key, seen.revision))
        if epoch is None or epoch.held is None:
            raise _Violation(f"saw revision {seen.revision}, which no client wrote there:\n  {op}")
        _require_fit(*_after(epoch.held, op), op, f"at revision {seen.revision}")
        self._present.append((op, epoch))

    def judge(self) -> None:
        """Find a moment for each commit: the earliest possible one, in order.

        A read bounds two commits: the epoch it saw must begin before it returned, and must not end
        before it was called. A read that found nothing may belong to any epoch without the key. It
        is assigned to the latest that could have begun before it returned, which delays the commit
        that ends the epoch the least. That may push other commits later, so this is repeated until
        nothing moves.
        """
        for op, epoch in self._present:
            self._end_after(epoch, op)
        gaps = {key: [epoch for epoch in life if epoch.held is None] for key, life in self._lives.items()}
        moved = True
        while moved:
            self._set_points()
            moved = False
            for op in self._absent:
                assert op.returned is not None
                holes = gaps[op.key]
                latest = bisect_right(holes, float(op.returned), key=lambda epoch: epoch.start.point) - 1
                moved |= self._end_after(holes[latest], op)
        for op, epoch in self._present:
            assert op.returned is not None
            if epoch.start.point > op.returned:
                raise _Violation(
                    f"saw the future:\n  {op}\nreturned before there was\n  {_write_of(epoch)}\n"
                    f"which cannot have happened before the call of\n  {epoch.start.pushed_by}"
                )

    def _end_after(self, epoch: _Epoch, op: Operation) -> bool:
        life = self._lives[op.key]
        return epoch.number + 1 < len(life) and life[epoch.number + 1].start.follow(op)

    def _set_points(self) -> None:
        """Give each commit its earliest point."""
        point, pushed_by = -math.inf, None
        for commit in self._commits:
            if commit.after > point:
                point, pushed_by = commit.after, commit.after_operation
            commit.point, commit.pushed_by = point, pushed_by
            if point > commit.before:
                revision, op = commit.parts[-1]
                assert pushed_by is not None
                reason = "is smaller in the order of revisions" if pushed_by.writes else "still saw what was before it"
                raise _Violation(
                    f"{'stale' if not pushed_by.writes else 'out of order'}: after\n  {op}\n"
                    f"had returned with revision {revision}, this was called, and {reason}:\n  {pushed_by}"
                )


def _group_commits(operations: Sequence[Operation], by_revision: Mapping[int, Operation]) -> list[_Commit]:
    """The commits in order. The writes of a batch must be adjacent and complete."""
    commits: list[_Commit] = []
    latest, begun = None, set()
    for revision, op in sorted(by_revision.items()):
        if op.call != latest:
            if op.call in begun:
                raise _Violation(f"torn: another commit came between the writes of the batch of\n  {op}")
            begun.add(op.call)
            commits.append(_Commit())
            latest = op.call
        commits[-1].add(revision, op)
    applied = set(map(id, by_revision.values()))
    for op in operations:
        # A delete that found nothing has no revision; any other write has one, once its batch was applied.
        if op.call in begun and op.writes and op.op != "delete" and id(op) not in applied:
            raise _Violation(f"half a batch: other writes of its batch happened, and this did not:\n  {op}")
    return commits


def _write_of(epoch: _Epoch) -> Operation:
    assert epoch.held is not None
    return next(op for revision, op in epoch.start.parts if revision == epoch.held.revision)


def _require_fit(_: KeyState | None, problem: str | None, op: Operation, where: str) -> None:
    if problem is not None:
        raise _Violation(f"does not fit {where}: {problem}:\n  {op}")


# The watch --------------------------------------------------------------------


def check_watch(
    events: Iterable[Logged],
    operations: Sequence[Operation],
    final: Mapping[str, Entry | None],
) -> str | None:
    """Whether a watch of all keys delivered each change once, in order, and nothing else.

    Args:
        events: The events it delivered, without the initial state.
        operations: All writes since it began.
        final: The entries of the watched keys after the last event.
    """
    delivered = list(events)
    try:
        _check_sequence(delivered)
        by_revision = _writes_by_revision(operations, delivered, "delivered")
        _check_batches(delivered, by_revision)
        _check_replay(delivered, final)
    except _Violation as found:
        return str(found)
    return None


def _check_sequence(events: Sequence[Logged]) -> None:
    """Check that revisions grow, and that the changes of a commit come together."""
    before: Logged | None = None
    known: set[int] = set()
    for event in events:
        if event.revision in known:
            raise _Violation(f"delivered twice: revision {event.revision}, {event.op} of {event.key!r}")
        known.add(event.revision)
        if event.commit < event.revision:
            raise _Violation(f"revision {event.revision} is delivered as part of an earlier commit, {event.commit}")
        if before is not None and event.revision < before.revision:
            raise _Violation(f"out of order: revision {event.revision} came after {before.revision}")
        if before is not None and event.commit != before.commit and event.revision <= before.commit:
            raise _Violation(f"torn: revision {event.revision} lies inside the commit that ends at {before.commit}")
        before = event


def _check_batches(events: Sequence[Logged], by_revision: Mapping[int, Operation]) -> None:
    """Check that the events of a call, and no others, carry its last revision as their commit."""
    last: dict[int, int] = {}
    for revision, op in by_revision.items():
        last[op.call] = max(revision, last.get(op.call, 0))
    for event in events:
        op = by_revision[event.revision]
        if event.commit != last[op.call]:
            raise _Violation(f"revision {event.revision} is delivered with the wrong commit, {event.commit}:\n  {op}")


def _check_replay(events: Sequence[Logged], final: Mapping[str, Entry | None]) -> None:
    """Check that applying the events to an empty namespace gives the final entries."""
    state: dict[str, KeyState] = {}
    for event in events:
        held = KeyState.of(event.entry)
        before = state.pop(event.key, None)
        assert held is not None
        version = 0 if before is None else before.version or 0
        if event.op != "delete":
            version += 1
            state[event.key] = held
        if held.version != version:
            raise _Violation(
                f"the {event.op} of {event.key!r} at revision {event.revision} shows version {held.version}, and by "
                f"the events before it that is {version}: one is missing, or too many"
            )
    for key in sorted({*state, *final}):
        found = KeyState.of(final.get(key))
        if found != state.get(key):
            raise _Violation(
                f"the events leave {key!r} with {state.get(key) or 'nothing'}, and it holds {found or 'nothing'}"
            )
