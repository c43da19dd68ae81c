"""The values of a store as msgpack: what was sent arrives, and anything else is refused without a trace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import MappingProxyType
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet import codec
from limpet.errors import (
    Ambiguous,
    Closed,
    Compacted,
    InvalidKey,
    InvalidValue,
    LimpetError,
    PermissionDenied,
    RateLimited,
    Unavailable,
    ValueTooLarge,
)
from limpet.keys import Span
from limpet.model import (
    ABSENT,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Change,
    Commit,
    Delete,
    Entry,
    Equals,
    Expire,
    FieldEquals,
    Filter,
    Guard,
    HeldBy,
    Import,
    LogPage,
    Patch,
    Put,
    Refusal,
    Revision,
    ScanPage,
    Status,
    Test,
    Touch,
    Traits,
    Version,
    Window,
)
from limpet.protocol import engine_msgpack as wire
from limpet.server import validate
from tests.server.engine_support import Running, application, packed

EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

numbers = st.integers(0, 2**63 - 1)
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
families: st.SearchStrategy[Any] = st.sampled_from(["data", "lock"])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
encoded = (json_values | st.binary(max_size=20)).map(codec.encode_field)
stored: st.SearchStrategy[Any] = encoded | st.dictionaries(words, encoded, max_size=3)
metas: st.SearchStrategy[Any] = st.sampled_from([None, KEEP, b'{"by":"me"}'])
ttls: st.SearchStrategy[Any] = st.none() | st.just(KEEP) | st.integers(1, 10**12)
conditions: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([ABSENT, PRESENT]),
    st.builds(Version, numbers),
    st.builds(Revision, numbers),
    st.builds(HeldBy, numbers),
    st.builds(Equals, stored),
    st.builds(FieldEquals, words, st.just(ABSENT) | encoded),
)
guards = st.builds(Guard, words, conditions, families)
writes = st.one_of(
    st.builds(Put, words, stored, ttls, metas, families),
    st.builds(Add, words, st.integers(-(2**63), 2**63 - 1), ttls, metas, families),
    st.builds(
        Patch,
        words,
        st.dictionaries(words, encoded, max_size=2),
        st.just(("gone",)),
        st.booleans(),
        ttls,
        metas,
        families,
    ),
    st.builds(
        Import,
        words,
        stored,
        meta_json=st.none(),
        family=families,
        version=numbers,
        created_ms=numbers,
        updated_ms=numbers,
        expires_ms=st.none() | numbers,
    ),
    st.builds(Touch, words, st.none() | st.integers(1, 10**12), families),
    st.builds(Delete, words, st.booleans(), families),
    st.builds(Expire, words, numbers, families),
)
batches = st.builds(
    Batch,
    st.lists(guards, max_size=3).map(tuple),
    st.lists(writes, max_size=4).map(tuple),
    st.none() | words,
    st.binary(max_size=16),
    st.none() | st.integers(1, 600_000),
    st.none() | numbers,
    st.integers(1, 10**7),
)
entries = st.builds(
    Entry,
    words,
    st.none() | stored,
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
    st.none() | numbers,
    st.none() | st.just(b'{"a":1}'),
)
ops: st.SearchStrategy[Any] = st.sampled_from(["put", "patch", "touch", "delete", "expire"])
changes = st.builds(Change, ops, entries, numbers, numbers, numbers, st.none() | words, families)
spans = st.builds(Span, words, st.none() | words)
comparisons: st.SearchStrategy[Any] = st.sampled_from(["eq", "ne", "lt", "in", "exists"])
filters = st.builds(
    Filter,
    st.lists(
        st.builds(Test, words, comparisons, st.lists(encoded, max_size=2).map(tuple), st.booleans()), max_size=2
    ).map(tuple),
)
nouns_that_travel = st.one_of(
    entries,
    changes,
    st.builds(ScanPage, st.lists(entries, max_size=3), st.none() | words),
    st.builds(LogPage, st.lists(changes, max_size=3), numbers),
    st.builds(Window, numbers, numbers, numbers, numbers),
    st.builds(Status, words, *[numbers] * 8),
    st.builds(wire.Scan, spans, families, st.none() | filters, st.booleans(), numbers),
    st.builds(wire.Changes, numbers, st.none() | spans, numbers, st.floats(0, 100)),
    st.builds(wire.Read, st.lists(words, max_size=3), families),
)


@EXAMPLES
@given(nouns_that_travel)
def test_a_noun_arrives_as_it_was_sent(noun: Any) -> None:
    assert wire.decode(wire.encode(noun), type(noun)) == noun


@EXAMPLES
@given(batches)
def test_a_batch_arrives_as_it_was_sent(batch: Batch) -> None:
    assert wire.decode_batch(wire.encode_batch(batch)) == batch


def test_constants_arrive_as_themselves() -> None:
    """Engines compare them by identity."""
    guards = (Guard("a", ABSENT), Guard("b", PRESENT), Guard("c", FieldEquals("f", ABSENT)))
    writes = (Put("a", b"1", KEEP, KEEP), Add("b", 1), Patch("c", {}))
    found = wire.decode_batch(wire.encode_batch(Batch(guards, writes, "r")))

    assert [found.guards[0].condition, found.guards[1].condition] == [ABSENT, PRESENT]
    assert found.guards[2].condition == FieldEquals("f", ABSENT)
    assert all(
        isinstance(write, Put | Add | Patch) and write.ttl_ms is write.meta_json is KEEP for write in found.writes
    )


def test_a_record_may_be_any_mapping() -> None:
    batch = Batch((), (Put("k", MappingProxyType({"f": b"1"})),), "r")

    assert wire.decode_batch(wire.encode_batch(batch)) == Batch((), (Put("k", {"f": b"1"}),), "r")


PUT_ARRAY = ["put", "k", b"1", None, None, "data"]
ENVELOPE = ["r", b"", None, None, 1_000_000, False]
NOT_A_BATCH: dict[str, Any] = {
    "an object": {"guards": [], "writes": []},
    "no writes": [[]],
    "a write of no kind": [[], [["hunter2", "k"]], *ENVELOPE],
    "a write that is an object": [[], [{"type": "put", "key": "k"}], *ENVELOPE],
    "a write without its value": [[], [PUT_ARRAY[:2]], *ENVELOPE],
    "a key that is a number": [[], [["put", 7, *PUT_ARRAY[2:]]], *ENVELOPE],
    "a value that is text": [[], [["put", "k", "hunter2", *PUT_ARRAY[3:]]], *ENVELOPE],
    "a time that is text": [[], [["put", "k", b"1", "hunter2"]], *ENVELOPE],
    "a time that is true": [[], [["put", "k", b"1", True]], *ENVELOPE],
    "a meta that is true": [[], [["put", "k", b"1", None, True]], *ENVELOPE],
    "a meta of no constant": [[], [["put", "k", b"1", None, 7]], *ENVELOPE],
    "a family that there is not": [[], [[*PUT_ARRAY[:5], "hunter2 - at home"]], *ENVELOPE],
    "a guard of no kind": [[["k", ["hunter2", 1], "data"]], [], *ENVELOPE],
    "a guard of no constant": [[["k", 7, "data"]], [], *ENVELOPE],
    "a guard of no field": [[["k", ["field", "f", None], "data"]], [], *ENVELOPE],
    "an outcome": ["commit", 1, [], [], 1],
}


@pytest.mark.parametrize("name", NOT_A_BATCH)
def test_what_is_no_batch_is_refused_by_its_place(name: str) -> None:
    with pytest.raises(InvalidValue, match="the message does not have the expected form") as refused:
        wire.decode_batch(packed(NOT_A_BATCH[name]))

    assert not any(word in str(refused.value) for word in ("hunter2", "home"))


def test_an_outcome_of_another_batch_is_refused() -> None:
    batch, other = Batch((), (PUT,), "r"), Batch((Guard("k", ABSENT),), (), "r")
    commit, refusal = Commit(1, (), (), 1), Refusal("guard", "k", None, 1, other.guards[0])

    with pytest.raises(InvalidValue, match="other writes"):
        wire.decode_outcome(wire.encode_outcome(commit, other), batch)
    with pytest.raises(InvalidValue, match="a guard that the batch does not have"):
        wire.decode_outcome(wire.encode_outcome(refusal, other), batch)


@st.composite
def commits(draw: st.DrawFn) -> tuple[Batch, Commit]:
    """A batch and what a server could answer: after a put the value is the one that was put."""
    batch = draw(batches)
    after = [
        msgspec.structs.replace(draw(entries), stored=write.stored)
        if isinstance(write, Put)
        else draw(entries | st.none())
        for write in batch.writes
    ]
    ended = [draw(entries | st.none()) for _ in batch.writes]
    return batch, Commit(draw(numbers), tuple(after), tuple(ended), draw(numbers), draw(st.booleans()))


@EXAMPLES
@given(commits())
def test_a_commit_arrives_with_the_values_that_only_its_sender_knows(both: tuple[Batch, Commit]) -> None:
    batch, commit = both
    sent = wire.encode_outcome(commit, batch)

    assert wire.decode_outcome(sent, batch) == commit


@EXAMPLES
@given(st.builds(Batch, st.lists(guards, min_size=1, max_size=3).map(tuple), st.just(())), st.data())
def test_a_refusal_arrives_with_the_guard_that_failed(batch: Batch, data: st.DataObject) -> None:
    guard = data.draw(st.none() | st.sampled_from(batch.guards))
    refusal = Refusal("guard", "key", data.draw(st.none() | entries), 7, guard, "an integer", 3)

    assert wire.decode_outcome(wire.encode_outcome(refusal, batch), batch) == refusal


def test_traits_arrive_as_they_were_sent() -> None:
    served = wire.Served(Traits("sqlite", "disk", "host", True), wire.Limits(1, 2, 3, 4.0))

    assert wire.decode(wire.encode(served), wire.Served) == served


@pytest.mark.parametrize(
    "error",
    [
        InvalidKey("k", "it is empty"),
        ValueTooLarge("k", size_bytes=9, limit_bytes=8),
        PermissionDenied("no"),
        RateLimited("too often", retry_after=2.5),
        Compacted("it was trimmed", oldest=7),
        Unavailable("later"),
    ],
    ids=lambda error: error.code,
)
def test_an_error_is_the_same_on_the_other_side(error: LimpetError) -> None:
    failure = wire.decode(wire.encode(wire.failure_of(error)), wire.Failure)
    found = wire.error_of(failure)

    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_a_server_that_closes_is_not_a_store_that_was_closed() -> None:
    found = wire.error_of(wire.failure_of(Closed()))

    assert isinstance(found, Unavailable)


def test_an_unknown_outcome_keeps_what_it_needs_to_be_settled() -> None:
    found = wire.error_of(wire.Failure("ambiguous", "unknown outcome", {"request_id": 3}))

    assert isinstance(found, Ambiguous)
    assert (found.request_id, found.since) == (None, 0)


def test_an_error_that_is_not_ours_tells_nothing() -> None:
    failure = wire.failure_of(RuntimeError("hunter2"))

    assert "hunter2" not in repr(failure)
    assert wire.error_of(failure) is None


# What is not of the contract ------------------------------------------------------

PUT = Put("k", b"1")
DEEP = b"[" * 200 + b"]" * 200

NOT_ALLOWED: dict[str, Batch] = {
    "a value that is not JSON": Batch((), (Put("k", b"hunter2"),), "r"),
    "a value that is not canonical": Batch((), (Put("k", b'{"b":1, "a":2}'),), "r"),
    "no value at all": Batch((), (Put("k", b""),), "r"),
    "a value nested too deep": Batch((), (Put("k", DEEP),), "r"),
    "a field that is not JSON": Batch((), (Put("k", {"f": b"{"}),), "r"),
    "a field without a name": Batch((), (Put("k", {"": b"1"}),), "r"),
    "a value that is too large": Batch((), (Put("k", b"\0" + bytes(1_000_001)),), "r"),
    "an empty key": Batch((), (Put("", b"1"),), "r"),
    "a key with a zero": Batch((), (Put("a\0b", b"1"),), "r"),
    "a key that is too long": Batch((), (Put("k" * 1025, b"1"),), "r"),
    "a key that is written twice": Batch((), (PUT, Delete("k")), "r"),
    "too many writes": Batch((), tuple(Delete(str(number)) for number in range(129)), "r"),
    "too many expiries": Batch((), tuple(Expire(str(number), 1) for number in range(501)), "r"),
    "too many guards": Batch(tuple(Guard(str(number), ABSENT) for number in range(17)), (), "r"),
    "a time to live of zero": Batch((), (Put("k", b"1", 0),), "r"),
    "a time to live of an age": Batch((), (Touch("k", 10**15),), "r"),
    "a meta that is no object": Batch((), (Put("k", b"1", None, b"[]"),), "r"),
    "a meta that is too large": Batch((), (Put("k", b"1", None, b'{"a":"%s"}' % (b"x" * 9000)),), "r"),
    "a sum beyond all counters": Batch((), (Add("k", 2**63),), "r"),
    "a field both set and unset": Batch((), (Patch("k", {"f": b"1"}, ("f",)),), "r"),
    "a revision below zero": Batch((), (Expire("k", -1),), "r"),
    "a guard beyond all numbers": Batch((Guard("k", Version(2**64 - 1)),), (), "r"),
    "a guard that is not JSON": Batch((Guard("k", FieldEquals("f", b"nan")),), (), "r"),
    "a guard on a receipt": Batch((Guard("k", ABSENT, "receipt"),), (), "r"),
    "a receipt of one's own": Batch((), (Put("k", b"1", family="receipt"),), "r"),
    "a lock that never ends": Batch((), (Put("k", b'{"holder":"me"}', family="lock"),), "r"),
    "a lock without a holder": Batch((), (Put("k", b"{}", 1000, family="lock"),), "r"),
    "a lock that counts": Batch((), (Add("k", 1, family="lock"),), "r"),
    "a version below zero": Batch((Guard("k", Version(-1)),), (PUT,), "r"),
    "a version beyond 64 bits": Batch((Guard("k", Version(2**64 - 1)),), (PUT,), "r"),
    "a token beyond 64 bits": Batch((Guard("k", HeldBy(2**64 - 1), "lock"),), (PUT,), "r"),
    "a guard of another constant": Batch((Guard("k", KEEP),), (PUT,), "r"),  # type: ignore[arg-type]
    "a field of another constant": Batch((Guard("k", FieldEquals("f", PRESENT)),), (PUT,), "r"),  # type: ignore[arg-type]
    "a time to live of another constant": Batch((), (Put("k", b"1", ABSENT),), "r"),  # type: ignore[arg-type]
    "a time to keep that a touch has not": Batch((), (Touch("k", KEEP),), "r"),  # type: ignore[arg-type]
    "a meta of another constant": Batch((), (Put("k", b"1", None, ABSENT),), "r"),  # type: ignore[arg-type]
    "no request id": Batch((), (PUT,)),
    "a request id that is no key": Batch((), (PUT,), ""),
    "a digest of any length": Batch((), (PUT,), "r", bytes(65)),
    "a receipt for ever": Batch((), (PUT,), "r", b"", 10**12),
    "a retry from before all time": Batch((), (PUT,), "r", retry_since=-1),
    "a limit below zero": Batch((), (PUT,), "r", value_bytes_max=-1),
}


@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_a_batch_that_no_draft_makes_is_refused(name: str) -> None:
    """An engine trusts its caller, so the server has to check."""
    batch = wire.decode_batch(wire.encode_batch(NOT_ALLOWED[name]))

    with pytest.raises(LimpetError) as refused:
        validate.check_batch(batch, value_bytes_max=1_000_000, any_lock=False)
    assert refused.value.outcome == "rejected"
    assert "hunter2" not in str(refused.value)


def test_a_batch_that_a_draft_makes_is_taken() -> None:
    batch = Batch((Guard("k", Version(0)), Guard("l", HeldBy(3), "lock")), (PUT, Touch("l", 9, "lock")), "r")

    assert validate.check_batch(batch, value_bytes_max=1_000_000, any_lock=False) == batch


def test_nobody_makes_up_the_hash_of_a_request() -> None:
    """A receipt is the reply to any caller with its id and its hash, so two requests never have the same."""
    first, second = Batch((), (PUT,), "r", b"hash", 1000), Batch((), (Delete("k"),), "r", b"hash", 1000)
    hashes = {validate.check_batch(batch, value_bytes_max=10, any_lock=False).digest for batch in (first, second)}

    assert len(hashes) == 2


# Over HTTP --------------------------------------------------------------------------

PRIMITIVES = ("read", "scan", "count", "commit", "changes", "due", "trim", "status")
SOUND: dict[str, Any] = {
    "read": wire.Read(["k"]),
    "scan": wire.Scan(Span("", None)),
    "count": wire.Count(Span("", None)),
    "commit": wire.Commits([msgspec.Raw(wire.encode_batch(Batch((), (PUT,), "r")))]),
    "changes": wire.Changes(0),
    "due": wire.Due(),
    "trim": Window(),
    "status": {},
}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with application() as server:
        yield server


async def post(server: Running, path: str, body: bytes, media: str = wire.MEDIA) -> httpx2.Response:
    """Ask the application itself. What it does not catch, it raises here."""
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app), base_url="http://server") as client:
        return await client.post(path, content=body, headers={"Content-Type": media})


@pytest.mark.parametrize("primitive", PRIMITIVES)
async def test_what_a_client_sends_is_answered(server: Running, primitive: str) -> None:
    answer = await post(server, f"/v1/test/engine/{primitive}", wire.encode(SOUND[primitive]))

    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == wire.MEDIA


@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"hunter2",
        packed(None),
        packed([1, 2]),
        packed({"keys": 7, "span": 7, "batches": 7, "after": "x"}),
    ],
    ids=["nothing", "not msgpack", "text", "null", "a list", "of other types"],
)
async def test_what_cannot_be_read_is_the_senders_fault(server: Running, primitive: str, body: bytes) -> None:
    answer = await post(server, f"/v1/test/engine/{primitive}", body)

    if primitive != "status":
        assert answer.status_code == 400 or (primitive in ("due", "trim") and body[:1] == b"\x84")
    assert b"hunter2" not in answer.content


@EXAMPLES
@given(st.data())
async def test_nothing_that_is_sent_breaks_the_server(data: st.DataObject) -> None:
    """Requests of the right shape with anything in them, and sound ones with a byte or two changed."""
    primitive = data.draw(st.sampled_from(PRIMITIVES))
    loose = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    )
    shaped = {
        "read": st.fixed_dictionaries({"keys": st.lists(st.text(max_size=3)), "family": loose | families}),
        "scan": st.fixed_dictionaries({"span": st.fixed_dictionaries({"start": st.text(max_size=3), "stop": loose})}),
        "count": st.fixed_dictionaries({"span": st.fixed_dictionaries({"start": st.text(max_size=3), "stop": loose})}),
        "commit": st.fixed_dictionaries({"batches": st.lists(loose | batches.map(wire.encode_batch).map(msgspec.Raw))}),
        "changes": st.fixed_dictionaries({"after": st.integers(-1, 2**64 - 1)}),
        "due": st.fixed_dictionaries({"limit": st.integers(-1, 2**64 - 1)}),
        "trim": st.fixed_dictionaries({"age_ms": st.integers(-1, 2**64 - 1)}),
        "status": loose,
    }
    body = data.draw(
        st.one_of(st.just(wire.encode(SOUND[primitive])), shaped[primitive].map(packed), loose.map(packed))
    )
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, max(0, len(body) - 1)))
        body = body[:place] + data.draw(st.binary(min_size=1, max_size=2)) + body[place + 1 :]

    async with application() as server:
        answer = await post(server, f"/v1/test/engine/{primitive}", body)

    assert answer.status_code < 500, wire.decode(answer.content, wire.Failure)
    if primitive == "commit" and answer.status_code == 200:
        for raw in wire.decode(answer.content, wire.Outcomes):
            assert b"internal error" not in bytes(raw)


async def test_a_request_that_is_too_large_is_refused_before_it_is_read(server: Running) -> None:
    answer = await post(server, "/v1/test/engine/commit", bytes(9_000_000))

    assert answer.status_code == 413
    assert wire.decode(answer.content, wire.Failure).attributes["limit_bytes"] == 8_000_000


async def test_a_form_of_another_site_is_refused(server: Running) -> None:
    """A browser sends text and forms to anywhere without asking."""
    answer = await post(server, "/v1/test/engine/commit", wire.encode(SOUND["commit"]), media="text/plain")

    assert answer.status_code == 400
    assert (await server.session.engine.status("test")).revision == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/test/engine/drop", 400),
        ("/v1/Test/engine/read", 400),
        ("/v1/te%2Fst/engine/read", 404),
        ("/v1/limpet-server/engine/read", 403),
    ],
)
async def test_what_there_is_not_is_told(server: Running, path: str, status: int) -> None:
    assert (await post(server, path, wire.encode(SOUND["read"]))).status_code == status


def test_what_is_wrong_is_told_by_its_place_and_not_by_its_value() -> None:
    with pytest.raises(InvalidValue) as refused:
        wire.decode(packed({"keys": ["a", 7], "family": "hunter2"}), wire.Read)

    assert "$.keys[1]" in str(refused.value)
    assert "hunter2" not in str(refused.value)
