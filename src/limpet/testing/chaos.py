"""Any engine, with the faults of a network in front of it.

    chaos:memory:?seed=7
    chaos:sqlite:///state.db?rate=0.3&faults=lost,delay&delay_ms=20

A store retries by itself, so most programs notice nothing of these faults, and that is what to test: with ``chaos:``
in front of its URL a program must do the same as without. What happens is drawn by the seed, so a run with the same
seed and the same order of calls meets the same faults.

- ``refused``: the call fails before it did anything.
- ``lost``: a commit is applied and its reply is lost.
- ``twice``: a commit is sent a second time after it was applied, as a retry whose first reply came late.
- ``delay``: the call takes up to ``delay_ms`` longer, before or after the engine did it.
- ``gap``: the namespace skips a revision.

For a test of one case, `Chaos.of` gives the switches of an open store: `Chaos.down` and `Chaos.lose_replies`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, Literal, Self, TypeVar, cast, get_args

import msgspec

import limpet
import limpet.sync
from limpet.clock import Clock
from limpet.engine import Engine
from limpet.errors import Ambiguous, InvalidValue, Unavailable
from limpet.keys import Span
from limpet.model import (
    Batch,
    Commit,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    Put,
    Refusal,
    ScanPage,
    Status,
    Traits,
    Window,
)
from limpet.request_ids import new_request_id
from limpet.transition import make_receipt
from limpet.urls import Address, open_address

__all__ = ["Chaos", "Fault", "open"]

Fault = Literal["refused", "lost", "twice", "delay", "gap"]
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
_CALLS: Final = ("read", "scan", "count", "namespaces", "commit", "changes", "due", "trim", "status")
_OF_COMMITS: Final = frozenset({"lost", "twice", "gap"})

T = TypeVar("T")

log = logging.getLogger("limpet.testing")


async def open(address: Address, clock: Clock) -> Engine:
    """Open the engine behind ``chaos:``, with faults in front of it."""
    inner = address
    for name in ("seed", "rate", "faults", "delay_ms"):
        inner = inner.without(name)
    _, _, url = inner.url.partition(":")
    if not url:
        raise InvalidValue(f"{address}: chaos: stands in front of another URL, as in chaos:memory:?seed=7")
    return Chaos(
        await open_address(Address.parse(url), clock),
        seed=int(_number(address, "seed", str(random.randrange(1_000_000)))),
        rate=_number(address, "rate", "0.1", most=1),
        faults=[_fault(address, name) for name in address.options.get("faults", ",".join(FAULTS)).split(",")],
        delay_ms=_number(address, "delay_ms", "5"),
    )


def _number(address: Address, name: str, default: str, *, most: float = 1e9) -> float:
    try:
        number = float(address.options.get(name, default))
    except ValueError:
        number = -1
    if not 0 <= number <= most:
        raise InvalidValue(f"{address}: {name} is a number from 0 to {most:g}")
    return number


def _unread_receipt() -> Put:
    """A write that no reader sees: the receipt of a request that will not come again. It is trimmed as others are."""
    request = Batch((), (), request_id=new_request_id())
    receipt = make_receipt(request, Commit(0, (), (), 0), 1)
    assert receipt.stored is not None
    return Put(receipt.key, receipt.stored, ttl_ms=1, family="receipt")


def _fault(address: Address, name: str) -> Fault:
    if name not in FAULTS:
        raise InvalidValue(f"{address}: faults are {', '.join(FAULTS)}, separated by commas, not {name!r}")
    return name


class Chaos:
    """An engine in front of another one.

    Attributes:
        seed: What the faults are drawn by.
        happened: The faults so far: the number of the call, its name, and the fault.
    """

    def __init__(self, engine: Engine, *, seed: int, rate: float, faults: Sequence[Fault], delay_ms: float) -> None:
        self.seed = seed
        self.happened: list[tuple[int, str, Fault]] = []
        self._engine = engine
        self._rate, self._faults, self._delay_s = rate, tuple(faults), delay_ms / 1_000
        # One for each kind of call: when the sweeper calls, in the background, must not change what commits meet.
        self._dice = {call: random.Random(f"{seed} {call}") for call in _CALLS}
        self._calls = itertools.count(1)
        self._is_down = False
        self._replies_to_lose = 0
        log.info("chaos: seed %d, rate %g, faults %s", seed, rate, ", ".join(faults))

    @classmethod
    def of(cls, store: limpet.Store | limpet.sync.Store) -> Self:
        """The switches of a store that was opened with ``chaos:`` in front of its URL."""
        opened: Any = store._twin if isinstance(store, limpet.sync.Store) else store
        engine = opened._session.engine
        if not isinstance(engine, cls):
            raise InvalidValue("this store has no switches: open it with chaos: in front of its URL, as chaos:memory:")
        return engine

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """As long as this is entered, every call fails as if the server were away."""
        self._is_down = True
        try:
            yield
        finally:
            self._is_down = False

    def lose_replies(self, count: int = 1) -> None:
        """Lose the replies of the next commits, which are applied. A store gives up after five in a row."""
        self._replies_to_lose = count

    # The engine ---------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        """Describe the engine behind. A call that fails is repeated after a pause, so that none completes in place."""
        return msgspec.structs.replace(self._engine.traits, inline=False)

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """Read entries by key. See `Engine`."""
        return await self._call("read", lambda: self._engine.read(namespace, keys, family=family))

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
        """Read live entries of a span. See `Engine`."""
        options: dict[str, Any] = {"family": family, "where": where, "values": values}
        return await self._call(
            "scan", lambda: self._engine.scan(namespace, span, limit=limit, reverse=reverse, **options)
        )

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """Count the live entries of a span. See `Engine`."""
        return await self._call("count", lambda: self._engine.count(namespace, span, family=family))

    async def namespaces(self) -> list[str]:
        """List the namespaces that were written to. See `Engine`."""
        return await self._call("namespaces", self._engine.namespaces)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """Apply a batch. See `Engine`."""
        fault = self._draw("commit", of_commits=True)
        if self._replies_to_lose:
            self._replies_to_lose -= 1
            fault = "lost"
        match fault:
            case "lost":
                named, since = await self._name(namespace, batch)
                await self._engine.commit(namespace, named)
                raise Ambiguous("chaos lost the reply", request_id=named.request_id, since=since)
            case "twice":
                named, since = await self._name(namespace, batch)
                await self._engine.commit(namespace, named)
                again = msgspec.structs.replace(named, retry_since=since)
                return await self._engine.commit(namespace, again)
            case "gap":
                await self._engine.commit(namespace, Batch((), (_unread_receipt(),)))
            case _:
                pass
        return await self._delayed(fault, lambda: self._engine.commit(namespace, batch))

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """Read the log. See `Engine`."""
        return await self._call(
            "changes", lambda: self._engine.changes(namespace, after, span=span, limit=limit, wait_s=wait_s)
        )

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """List the entries that have expired. See `Engine`."""
        return await self._call("due", lambda: self._engine.due(namespace, limit=limit))

    async def trim(self, namespace: str, window: Window) -> int:
        """Drop changes that the log need not keep. See `Engine`."""
        return await self._call("trim", lambda: self._engine.trim(namespace, window))

    async def status(self, namespace: str) -> Status:
        """Read the counters. See `Engine`."""
        return await self._call("status", lambda: self._engine.status(namespace))

    async def close(self) -> None:
        """Close the engine behind. See `Engine`."""
        await self._engine.close()

    # Faults -------------------------------------------------------------------

    async def _call(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        return await self._delayed(self._draw(name), call)

    def _draw(self, call: str, *, of_commits: bool = False) -> Fault | None:
        """Draw what happens to a call. Raises `Unavailable` for a call that is refused."""
        number, dice = next(self._calls), self._dice[call]
        # Both are drawn for every call, so that a change of the rate or of the switches changes no other call.
        happens, fault = dice.random() < self._rate, dice.choice(self._faults)
        if self._is_down:
            raise Unavailable("chaos: the engine is down")
        if not happens or (fault in _OF_COMMITS and not of_commits):
            return None
        self.happened.append((number, call, fault))
        log.debug("chaos: seed %d, call %d, %s: %s", self.seed, number, call, fault)
        if fault == "refused":
            raise Unavailable(f"chaos refused call {number} of seed {self.seed}")
        return fault

    async def _delayed(self, fault: Fault | None, call: Callable[[], Awaitable[T]]) -> T:
        if fault != "delay":
            return await call()
        before_s, after_s = (random.random() * self._delay_s / 2 for _ in range(2))
        await asyncio.sleep(before_s)
        result = await call()
        await asyncio.sleep(after_s)
        return result

    async def _name(self, namespace: str, batch: Batch) -> tuple[Batch, int]:
        """The batch with a request id, and a revision before its changes."""
        status = await self._engine.status(namespace)
        named = msgspec.structs.replace(batch, request_id=batch.request_id or new_request_id())
        return named, status.revision if batch.retry_since is None else batch.retry_since

    def __repr__(self) -> str:
        return f"Chaos(seed={self.seed}, {cast(object, self._engine)!r})"
