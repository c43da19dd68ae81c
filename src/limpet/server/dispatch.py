"""The dispatcher: every request of every face passes here, once.

It asks whether the caller may, whether the namespace has room and time left, runs the operation, and tells the
observers what came of it. A face turns what it was sent into a request, and the answer, or the error, into what it
sends back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from limpet.errors import PermissionDenied
from limpet.keys import Span, check_namespace, key_span
from limpet.semantic.store import SemanticStore, VersionConflict
from limpet.server.fronts import own_ids, put_boundary
from limpet.server.operations import Operation, Right
from limpet.server.requests import Request
from limpet.session import Session
from limpet.store import Store

__all__ = ["OWN_NAMESPACE", "Call", "Caller", "Callers", "Check", "Dispatcher", "Face", "Observer", "TrustedCaller"]

OWN_NAMESPACE: Final = "limpet-server"
"""Where the server keeps what is its own: tokens, and which namespaces it serves. No caller reaches it."""

Face = Literal["nats", "http"]

_TO_SEE: Final[tuple[Right, ...]] = ("read", "reveal")
_TO_SHARE_IDS: Final[tuple[Right, ...]] = ("read", "reveal", "write")
_EVERYTHING: Final = (Span("", None),)


class Caller(Protocol):
    """Who asks."""

    @property
    def name(self) -> str:
        """Who it is, for logs."""
        ...

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        """Whether this caller has a right on all of these keys; with no keys named, whether on any in the namespace."""
        ...


class Callers(Protocol):
    """Who may ask over HTTP.

    If it has a coroutine ``changed``, that returns when rights have changed, and open streams are checked at once.
    Otherwise they are checked every second.
    """

    async def caller_of(self, token: str | None, client: str | None) -> Caller:
        """Whose token this is, or who asks without one from this address. Raises `PermissionDenied`."""
        ...


class TrustedCaller:
    """A caller whom something else let through.

    On NATS that is the permission for a subject, on HTTP an address that only this machine reaches.
    """

    def __init__(self, name: str = "anonymous") -> None:
        self.name = name

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        """Anything but the care of the server itself."""
        return right != "admin"


class Check(Protocol):
    """What holds a namespace to its rate, to its room, or to its trail. Raises `RateLimited` or `PermissionDenied`."""

    async def check(self, store: Store, operation: Operation, asked: Request) -> None:
        """Let a request pass, or raise."""
        ...


class Call(NamedTuple):
    """What came of a request, for observers. Values are in ``asked`` and ``answer``, and go no further.

    Attributes:
        has_reply: Whether the caller is told what came of it. Where not, only the log tells.
        subject: Where it was sent, if it was refused because of that.
    """

    face: Face
    caller: str
    namespace: str
    operation: str
    asked: Request | None
    seconds: float
    answer: dict[str, Any] | None = None
    error: Exception | None = None
    has_reply: bool = True
    subject: str | None = None


class Observer(Protocol):
    """Somebody who hears of every request: a log, a metric."""

    def done(self, call: Call) -> None:
        """Take note. It must be quick, and must not raise."""
        ...


class Dispatcher:
    """Runs the operations of one face on one session."""

    def __init__(
        self,
        session: Session,
        face: Face,
        *,
        gates: Sequence[Check] = (),
        observers: Sequence[Observer] = (),
        read_only: bool = False,
        semantic: Callable[[Store], SemanticStore] = SemanticStore,
    ) -> None:
        self._session = put_boundary(session)
        self._face: Face = face
        self._gates = gates
        self._observers = observers
        self._read_only = read_only
        self._semantic = semantic
        self._stores: dict[str, Store] = {}
        self._noted: set[str] = set()

    def store(self, namespace: str) -> Store:
        """The store of a namespace that callers may reach."""
        found = self._stores.get(namespace)
        if found is None:
            if check_namespace(namespace) == OWN_NAMESPACE:
                raise PermissionDenied(f"namespace {OWN_NAMESPACE!r} is the server's own")
            found = self._stores[namespace] = Store(self._session, namespace)
        return found

    async def run(
        self, operation: Operation, namespace: str, asked: Request, caller: Caller, *, has_reply: bool = True
    ) -> dict[str, Any]:
        """Run an operation for a caller, who is told what comes of it or not."""
        began = time.perf_counter()
        call = Call(self._face, caller.name, namespace, operation.name, asked, 0.0, has_reply=has_reply)
        try:
            store = await self.admit(operation, namespace, asked, caller)
            answer = await operation.run(self._semantic(store) if operation.is_semantic else store, asked)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, VersionConflict):
                spans = [key_span(error.key)]
                error.is_shown = all(caller.may(namespace, right, spans) for right in _TO_SEE)
            kept = error if isinstance(error, Exception) else None
            self._tell(call._replace(seconds=_since(began), error=kept))
            raise
        self._tell(call._replace(seconds=_since(began), answer=answer))
        return answer

    async def admit(self, operation: Operation, namespace: str, asked: Request, caller: Caller) -> Store:
        """Let a request pass, or raise; for a stream, whose end nobody waits for."""
        # Rights first: whoever has none makes this server keep nothing for a namespace, not even its name.
        self.check_rights(operation, namespace, asked, caller)
        store = self.store(namespace)
        for gate in self._gates:
            await gate.check(store, operation, asked)
        if namespace not in self._noted and operation.right_for(asked) != "read":
            await self._note(namespace)
        # A semantic write compares what it was sent with its receipt. That of another caller would tell of its value.
        session = self.session_of(caller, namespace, finds_others=not operation.is_semantic)
        return store if session is self._session else Store(session, namespace)

    def session_of(self, caller: Caller, namespace: str, *, finds_others: bool = True) -> Session:
        """The session as a caller has it.

        Who sees and writes the whole namespace shares its request ids with everybody else who does. The ids of any
        other caller are its own: they cannot use up an id of others, nor tell whether a guess of what was sent under
        one is right. A token keeps its name when it is rotated, and with it its ids. ``finds_others`` lets it find the
        receipts of others by the ids that the log has.
        """
        if all(caller.may(namespace, right, _EVERYTHING) for right in _TO_SHARE_IDS):
            return self._session
        return self._session.with_engine(own_ids(self._session.engine, caller.name, finds_others=finds_others))

    def refused(
        self,
        caller: Caller,
        namespace: str,
        name: str,
        error: Exception,
        *,
        has_reply: bool = True,
        subject: str | None = None,
    ) -> None:
        """Take note of a request that did not get as far as an operation."""
        call = Call(self._face, caller.name, namespace, name, None, 0.0, error=error)
        self._tell(call._replace(has_reply=has_reply, subject=subject))

    def check_rights(self, operation: Operation, namespace: str, asked: Request, caller: Caller) -> None:
        """Raise `PermissionDenied` unless the caller may. A stream asks again from time to time."""
        if check_namespace(namespace) == OWN_NAMESPACE:
            raise PermissionDenied(f"namespace {OWN_NAMESPACE!r} is the server's own")
        right, spans = operation.right_for(asked), operation.reach(asked).spans
        if self._read_only and right != "read":
            raise PermissionDenied("this server is for reading only")
        needed: list[Right] = [right, *(["reveal"] if operation.reveals_for(asked) else [])]  # type: ignore[list-item]
        for one in needed:
            if not caller.may(namespace, one, spans):
                raise PermissionDenied(f"{caller.name} may not {one} there in namespace {namespace!r}")

    async def _note(self, namespace: str) -> None:
        """Remember a namespace that is written to, so that a server that starts later sweeps it too."""
        own = Store(self._session, OWN_NAMESPACE)
        key = f"namespace/{namespace}"
        if await own.entry(key) is None:
            await own.put(key, True)
        self._noted.add(namespace)

    async def recall(self) -> list[str]:
        """Sweep every namespace that was ever written to through a server. Returns their names."""
        own = Store(self._session, OWN_NAMESPACE)
        names = [entry.key.partition("/")[2] async for entry in own.scan("namespace/")]
        for name in names:
            self.store(name)
        self._noted.update(names)
        return names

    def _tell(self, call: Call) -> None:
        for observer in self._observers:
            observer.done(call)


def _since(began: float) -> float:
    return time.perf_counter() - began
