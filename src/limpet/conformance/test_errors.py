"""Errors."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import limpet
from limpet import errors
from limpet.conformance.conftest import Elapse
from limpet.conformance.support import fail, next_event
from limpet.errors import LimpetError

# The whole vocabulary. A code is used on every wire and in every log, so a line here never changes.
LEAVES: dict[type[LimpetError], tuple[str, bool, str]] = {
    errors.InvalidKey: ("invalid_key", False, "rejected"),
    errors.InvalidNamespace: ("invalid_namespace", False, "rejected"),
    errors.InvalidValue: ("invalid_value", False, "rejected"),
    errors.InvalidTTL: ("invalid_ttl", False, "rejected"),
    errors.ValueTooLarge: ("value_too_large", False, "rejected"),
    errors.TypeMismatch: ("type_mismatch", False, "rejected"),
    errors.PermissionDenied: ("permission_denied", False, "rejected"),
    errors.Conflict: ("conflict", False, "rejected"),
    errors.NotFound: ("not_found", False, "rejected"),
    errors.LockHeld: ("lock_held", False, "rejected"),
    errors.LockNotHeld: ("lock_not_held", False, "rejected"),
    errors.LockExpired: ("lock_expired", False, "rejected"),
    errors.LockLost: ("lock_lost", False, "rejected"),
    errors.Compacted: ("compacted", False, "rejected"),
    errors.Unavailable: ("unavailable", True, "unavailable"),
    errors.Contention: ("contention", True, "unavailable"),
    errors.RateLimited: ("rate_limited", True, "unavailable"),
    errors.Ambiguous: ("ambiguous", True, "unknown"),
    errors.Corrupt: ("corrupt", False, "broken"),
    errors.Closed: ("closed", False, "broken"),
}

ENTRY = limpet.Entry("config/é", b'{"a":1}', 3, 12, 10, 1_700_000_000_000, 1_700_000_001_000, None, b'{"by":"me"}')

EXAMPLES: list[LimpetError] = [
    errors.InvalidKey("bad\0key", "U+0000 at position 3"),
    errors.InvalidKey(17, "a key is a str"),
    errors.InvalidNamespace("No!"),
    errors.InvalidNamespace(None),
    errors.InvalidValue("an integer is outside"),
    errors.InvalidValue("a float is not finite", path="$.a[3]"),
    errors.InvalidTTL("is not finite"),
    errors.ValueTooLarge("a", size_bytes=70_412, limit_bytes=65_536),
    errors.ValueTooLarge("a", size_bytes=70_412, limit_bytes=65_536, what="the batch"),
    errors.TypeMismatch("a", expected="an integer", found="a record"),
    errors.PermissionDenied("not yours"),
    errors.Conflict("a", expected="version 3", current=ENTRY),
    errors.Conflict("a", expected="no such key", current=None),
    errors.Conflict("request-1", expected="the same request", current=None, reason="stale_request"),
    errors.NotFound("a"),
    errors.LockHeld("job", holder="host:17", token=5, remaining=1.25),
    errors.LockNotHeld("job"),
    errors.LockExpired("job", token=5),
    errors.LockLost("job", token=5),
    errors.Compacted("revision 3 was trimmed", oldest=9),
    errors.Compacted("the position belongs to another store"),
    errors.Unavailable("the connection is lost"),
    errors.Contention("a", attempts=64),
    errors.RateLimited("too fast", retry_after=1.5),
    errors.Ambiguous("the answer is lost", request_id="request-1", since=7),
    errors.Corrupt("not a store"),
    errors.Closed(),
    errors.Closed("the other end has closed"),
]


def leaves(kind: type[LimpetError] = LimpetError) -> set[type[LimpetError]]:
    """The errors of the contract that have no subclasses."""
    below = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return {kind} if not below else set().union(*(leaves(child) for child in below))


def attributes(error: LimpetError) -> dict[str, Any]:
    return {
        "type": type(error),
        "text": str(error),
        "args": error.args,
        "code": error.code,
        "retryable": error.retryable,
        "outcome": error.outcome,
        **vars(error),
    }


# The table --------------------------------------------------------------------


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_an_error_has_its_code_flag_and_outcome(kind: type[LimpetError]) -> None:
    """Every error has a stable code, a retryable flag and an outcome."""
    assert (kind.code, kind.retryable, kind.outcome) == LEAVES[kind]


def test_no_error_is_missing_from_the_table() -> None:
    """Every error has a stable code, a retryable flag and an outcome."""
    assert leaves() == LEAVES.keys()


def test_every_error_is_public() -> None:
    """Every error has a stable code, a retryable flag and an outcome."""
    for kind in LEAVES:
        assert getattr(errors, kind.__name__) is kind
        assert kind.__name__ in errors.__all__


def test_no_two_errors_share_a_code() -> None:
    """Every error has a stable code, a retryable flag and an outcome."""
    codes = [code for code, _, _ in LEAVES.values()]

    assert len({*codes}) == len(codes)


def test_trying_again_helps_only_what_passes() -> None:
    """Every error has a stable code, a retryable flag and an outcome."""
    for kind in LEAVES:
        assert kind.retryable == issubclass(kind, errors.TransientError | errors.Ambiguous)
        assert kind.outcome in ("rejected", "unavailable", "unknown", "broken")


def test_every_error_is_a_limpet_error() -> None:
    """Every error has a stable code, a retryable flag and an outcome."""
    for kind in LEAVES:
        assert issubclass(kind, LimpetError)
        assert issubclass(kind, Exception)
        assert inspect.getdoc(kind)


# No error is another ----------------------------------------------------------


def test_no_error_is_a_kind_of_another() -> None:
    """Errors are disjoint: none is a kind of another."""
    for kind, other in itertools.permutations(LEAVES, 2):
        assert not issubclass(kind, other)


def test_an_error_belongs_to_one_family() -> None:
    """Errors are disjoint: none is a kind of another."""
    families = (
        errors.RequestError,
        errors.StateError,
        errors.TransientError,
        errors.Ambiguous,
        errors.BrokenError,
    )
    for kind in LEAVES:
        assert sum(issubclass(kind, family) for family in families) == 1


def test_an_error_is_no_error_of_python_itself() -> None:
    """Errors are disjoint: none is a kind of another.

    A handler for OSError or KeyError that was meant for something else does not swallow ours.
    """
    for kind in LEAVES:
        ours = [each for each in kind.__mro__ if each.__module__.startswith("limpet.")]
        assert [each for each in kind.__mro__ if each not in ours] == [Exception, BaseException, object]


async def expired_lock(store: limpet.Store, elapse: Elapse) -> limpet.Lock:
    lock = store.lock("job", ttl=0.2)
    await lock.acquire()
    await elapse(0.3)
    return lock


async def raise_lock_held(store: limpet.Store, _: Elapse) -> None:
    await store.lock("job", ttl=60).acquire()
    await store.lock("job", ttl=60).acquire()


async def raise_lock_expired(store: limpet.Store, elapse: Elapse) -> None:
    await (await expired_lock(store, elapse)).release()


async def raise_lock_lost(store: limpet.Store, elapse: Elapse) -> None:
    await store.put("a", 2, fence=await expired_lock(store, elapse))


async def raise_ambiguous(store: limpet.Store, elapse: Elapse) -> None:
    fail(store, after=5)
    working = asyncio.ensure_future(store.put("a", 2))
    while not working.done():
        await elapse(0.05)
    await working


async def raise_unavailable(store: limpet.Store, elapse: Elapse) -> None:
    fail(store, before=5)
    working = asyncio.ensure_future(store.put("a", 2))
    while not working.done():
        await elapse(0.05)
    await working


async def raise_closed(store: limpet.Store, _: Elapse) -> None:
    await store.close()
    await store.get("a")


RAISED: dict[type[LimpetError], Callable[[limpet.Store, Elapse], Awaitable[Any]]] = {
    errors.InvalidKey: lambda store, _: store.get("bad\0key"),
    errors.InvalidValue: lambda store, _: store.put("a", {1, 2}),
    errors.InvalidTTL: lambda store, _: store.put("a", 1, ttl=-1),
    errors.ValueTooLarge: lambda store, _: store.put("a", bytes(1_000_001)),
    errors.TypeMismatch: lambda store, _: store.add("text"),
    errors.Conflict: lambda store, _: store.create("text", 1),
    errors.NotFound: lambda store, _: store.record("missing").set(a=1, if_exists=True),
    errors.LockHeld: raise_lock_held,
    errors.LockNotHeld: lambda store, _: store.lock("job", ttl=1).release(),
    errors.LockExpired: raise_lock_expired,
    errors.LockLost: raise_lock_lost,
    errors.Compacted: lambda store, _: next_event(store.watch(after="nonsense")),
    errors.Ambiguous: raise_ambiguous,
    errors.Unavailable: raise_unavailable,
    errors.Closed: raise_closed,
}


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
async def test_what_is_raised_is_of_one_kind(store: limpet.Store, elapse: Elapse, kind: type[LimpetError]) -> None:
    """Errors are disjoint: none is a kind of another."""
    await store.put("text", "secret")

    with pytest.raises(LimpetError) as caught:
        await RAISED[kind](store, elapse)

    assert type(caught.value) is kind


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
async def test_what_is_raised_survives_pickling(store: limpet.Store, elapse: Elapse, kind: type[LimpetError]) -> None:
    """An error survives pickling with its attributes."""
    await store.put("text", "secret")
    with pytest.raises(kind) as caught:
        await RAISED[kind](store, elapse)

    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - it is our own

    assert attributes(again) == attributes(caught.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_every_way_of_pickling(protocol: int) -> None:
    """An error survives pickling with its attributes."""
    for error in EXAMPLES:
        again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - it is our own
        assert attributes(again) == attributes(error)


def test_every_error_has_an_example() -> None:
    """An error survives pickling with its attributes."""
    assert {type(error) for error in EXAMPLES} == LEAVES.keys()


def test_an_error_survives_copying() -> None:
    """An error survives pickling with its attributes."""
    for error in EXAMPLES:
        assert attributes(copy.copy(error)) == attributes(error)
        assert attributes(copy.deepcopy(error)) == attributes(error)


def test_a_conflict_brings_its_entry_along() -> None:
    """An error survives pickling with its attributes."""
    error = errors.Conflict("a", expected="version 3", current=ENTRY)

    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - it is our own

    assert again.current == ENTRY
    assert again.current.value == {"a": 1}
    assert (again.actual_version, again.actual_revision, again.reason) == (3, 12, "guard")


def test_an_error_can_be_raised_again_after_its_journey() -> None:
    """An error survives pickling with its attributes."""
    for error in EXAMPLES:
        arrived = pickle.loads(pickle.dumps(error))  # noqa: S301 - it is our own
        with pytest.raises(type(error)) as caught:
            raise arrived
        assert str(caught.value) == str(error)
