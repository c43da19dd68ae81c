"""The dispatcher: every request of every interface passes here, once.

It checks the caller's rights, then the rate, the quota and the audit rule of the namespace, runs the operation, and
reports the outcome to the observers. HTTP and NATS each turn what they receive into a request, and the answer, or the
error, into a reply.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from limpet.errors import LimpetError, PermissionDenied
from limpet.keys import Span, check_key, check_namespace, key_span
from limpet.semantic.store import SemanticStore
from limpet.server.fronts import own_ids, put_boundary
from limpet.server.namespaces import OWN_NAMESPACE, WrittenNamespaces
from limpet.server.operations import Operation, Right
from limpet.server.requests import Request
from limpet.session import Session
from limpet.store import Store

__all__ = ["OWN_NAMESPACE", "Call", "Caller", "Callers", "Check", "Dispatcher", "Face", "Observer", "TrustedCaller"]

Face = Literal["nats", "http", "mcp"]

STORES_MAX: Final = 10_000

_SEE: Final[tuple[Right, ...]] = ("read", "reveal")
_SHARE_IDS: Final[tuple[Right, ...]] = ("read", "reveal", "write")
_EVERYTHING: Final = (Span("", None),)


class Caller(Protocol):
    """The sender of a request."""

    @property
    def name(self) -> str:
        """Its name, for logs."""
        ...

    @property
    def writer(self) -> str | None:
        """The name of the writer that its entries and changes have; None for a caller that is not known by a name."""
        ...

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        """Whether this caller has a right on all of these keys; with no keys named, whether on any in the namespace."""
        ...


class Callers(Protocol):
    """The callers that HTTP knows.

    If it has a coroutine ``changed``, that returns when rights have changed, and open streams are checked at once.
    Otherwise they are checked every second.
    """

    async def caller_of(self, token: str | None, client: str | None) -> Caller:
        """The caller with this token, or the one without a token at this address. Raises `PermissionDenied`."""
        ...


class TrustedCaller:
    """A caller that something else has authenticated.

    On NATS that is the permission for a subject, on HTTP an address that only this machine reaches.
    """

    def __init__(self, name: str = "anonymous", *, writer: str | None = None) -> None:
        self.name = name
        self.writer = writer

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        """Every right but ``admin``, which is for operating the server itself."""
        return right != "admin"


class Check(Protocol):
    """A check before an operation runs: a rate limit, a quota, or an audit rule."""

    async def check(self, store: Store, operation: Operation, request: Request) -> None:
        """Raise `RateLimited` or `PermissionDenied` unless the request may run."""
        ...


class Call(NamedTuple):
    """A request and its outcome, for observers. Both hold values, which no observer may pass on.

    Attributes:
        has_reply: Whether the caller gets a reply. If not, only the log has the outcome.
        subject: The subject it was sent to, if it was refused because of that.
    """

    face: Face
    caller: str
    namespace: str
    operation: str
    request: Request | None
    seconds: float
    answer: dict[str, Any] | None = None
    error: Exception | None = None
    has_reply: bool = True
    subject: str | None = None


class Observer(Protocol):
    """A log or a metric, which is called for every request."""

    def done(self, call: Call) -> None:
        """Record a finished request. It must be quick, and must not raise."""
        ...


class Dispatcher:
    """Runs the operations of one interface on one session.

    Args:
        session: The opened engine that is served.
        face: The interface, for logs and metrics.
        checks: Run in this order before an operation, after the caller's rights.
        observers: Called after each request.
        read_only: Whether every write is refused.
        semantic: Makes the semantic store of a namespace.
        namespaces: The namespaces that were written to; dispatchers of one server share it.
    """

    def __init__(
        self,
        session: Session,
        face: Face,
        *,
        checks: Sequence[Check] = (),
        observers: Sequence[Observer] = (),
        read_only: bool = False,
        semantic: Callable[[Store], SemanticStore] = SemanticStore,
        namespaces: WrittenNamespaces | None = None,
    ) -> None:
        self._session = put_boundary(session)
        self._face: Face = face
        self._checks = checks
        self._observers = observers
        self._read_only = read_only
        self._semantic = semantic
        self._namespaces = namespaces or WrittenNamespaces(session)
        self._sessions: dict[str | None, Session] = {None: self._session}
        self._stores: dict[tuple[str, str | None], Store] = {}

    async def run(
        self, operation: Operation, namespace: str, request: Request, caller: Caller, *, has_reply: bool = True
    ) -> dict[str, Any]:
        """Run an operation for a caller, and report the outcome to the observers."""
        began = time.perf_counter()
        facts = (self._face, caller.name, namespace, operation.name, request)
        try:
            store = await self.admit(operation, namespace, request, caller)
            answer = await operation.run(self._semantic(store) if operation.is_semantic else store, request)
            await self._namespaces.wait_until_stored(namespace)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, LimpetError):
                error.reveal_if(lambda key: _may_see(caller, namespace, key))
            kept = error if isinstance(error, Exception) else None
            self._report(Call(*facts, time.perf_counter() - began, error=kept, has_reply=has_reply))
            raise
        self._report(Call(*facts, time.perf_counter() - began, answer, has_reply=has_reply))
        return answer

    async def admit(self, operation: Operation, namespace: str, request: Request, caller: Caller) -> Store:
        """Return the store that a request may run on, or raise. A stream uses it alone, because it has no outcome."""
        # Check permissions first, so that an unauthorised caller cannot make us allocate per-namespace state.
        self.check_rights(operation, namespace, request, caller)
        store = self.store(namespace, caller.writer)
        for check in self._checks:
            await check.check(store, operation, request)
        if operation.right_for(request) != "read":
            self._namespaces.add(namespace)
        # A semantic write compares its request with the receipt of its id. Another caller's would reveal a value.
        session = self.session_of(caller, namespace, finds_others=not operation.is_semantic)
        return store if session is store._session else Store(session, namespace)

    async def list_namespaces(self, caller: Caller) -> list[str]:
        """The namespaces that were written to, and in which the caller may read something."""
        found = await self._session.engine.namespaces()
        return [name for name in found if name != OWN_NAMESPACE and caller.may(name, "read", ())]

    def check_rights(self, operation: Operation, namespace: str, request: Request, caller: Caller) -> None:
        """Raise `PermissionDenied` unless the caller has the rights. A stream repeats this from time to time."""
        if namespace == OWN_NAMESPACE:
            raise PermissionDenied(f"namespace {OWN_NAMESPACE!r} is the server's own")
        right, reach = operation.right_for(request), operation.reach(request)
        needed: tuple[Right, ...] = (right, "reveal") if operation.reveals_for(request) else (right,)
        problem = ""
        if self._read_only and right != "read":
            problem = "this server is for reading only"
        elif lacking := [one for one in needed if not caller.may(namespace, one, reach.spans)]:
            problem = f"{caller.name!r} lacks the {lacking[0]} right on namespace {namespace!r}, or on these keys of it"
        if problem:
            # The store checks the names in a request that may run. An invalid name is reported before a lacking right.
            check_namespace(namespace)
            for key in reach.keys:
                check_key(key)
            raise PermissionDenied(problem)

    def store(self, namespace: str, writer: str | None = None) -> Store:
        """The store of a namespace, for a writer. The caller's rights are checked before."""
        found = self._stores.get((namespace, writer))
        if found is None:
            if len(self._stores) >= STORES_MAX:
                # Nothing is decided by what they hold.
                self._stores.clear()
            found = self._stores[namespace, writer] = Store(self._session_for(writer), namespace)
        return found

    def _session_for(self, writer: str | None) -> Session:
        found = self._sessions.get(writer)
        if found is None:
            if len(self._sessions) >= STORES_MAX:
                self._sessions = {None: self._session}
            found = self._sessions[writer] = self._session.with_writer(writer)
        return found

    def session_of(self, caller: Caller, namespace: str, *, finds_others: bool = True) -> Session:
        """The session as a caller has it.

        Callers that see and write the whole namespace share its request ids. The ids of any other caller are its own:
        it can neither use up an id of others, nor find out whether it guesses the request that was sent under one. A
        token keeps its name when it is rotated, and with it its ids. ``finds_others`` lets it find the receipts of
        others by the ids that the log has.
        """
        own = self._session_for(caller.writer)
        if all(caller.may(namespace, right, _EVERYTHING) for right in _SHARE_IDS):
            return own
        return own.with_engine(own_ids(own.engine, caller.name, finds_others=finds_others))

    def report_refusal(
        self,
        caller: Caller,
        namespace: str,
        name: str,
        error: Exception,
        *,
        has_reply: bool = True,
        subject: str | None = None,
    ) -> None:
        """Report a request that was refused before an operation could run."""
        call = Call(self._face, caller.name, namespace, name, None, 0.0, error=error)
        self._report(call._replace(has_reply=has_reply, subject=subject))

    def _report(self, call: Call) -> None:
        for observer in self._observers:
            observer.done(call)


def _may_see(caller: Caller, namespace: str, key: str) -> bool:
    return all(caller.may(namespace, right, (key_span(key),)) for right in _SEE)
