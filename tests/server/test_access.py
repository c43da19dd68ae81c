"""Tokens: which are valid, for what and for how long; and that no secret leaves the server."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet import ManualClock, Store
from limpet.errors import InvalidKey, InvalidNamespace, InvalidTTL, InvalidValue, NotFound, PermissionDenied
from limpet.keys import Span, key_span, pattern_span, prefix_span
from limpet.server import access
from limpet.server.access import (
    Bearer,
    Issued,
    Scope,
    Tokens,
    Unauthenticated,
    create_token,
    list_tokens,
    revoke_token,
    rotate_token,
)
from limpet.server.dispatch import OWN_NAMESPACE, Dispatcher
from limpet.server.operations import OPERATIONS, Right
from limpet.server.requests import request_of
from tests.engines import url_of

WAIT_S = 120.0
ALL: tuple[Right, ...] = ("read", "write", "lock", "reveal")


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that happens elsewhere."""
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
async def own(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Store]:
    """The server's own namespace."""
    url = url_of(request.param, tmp_path)
    async with limpet.open(url, namespace=OWN_NAMESPACE, clock=clock, sweep=False) as store:
        yield store


@pytest.fixture
async def tokens(own: Store) -> AsyncIterator[Tokens]:
    """A server's knowledge of them."""
    found = Tokens(own._session)
    await found.start()
    yield found
    await found.close()


async def known(tokens: Tokens, issued: Issued) -> Bearer:
    """The caller with a token, once the server knows it."""
    await until(lambda: tokens.find(issued.id) == issued.token)
    return await tokens.caller_of(issued.secret, "127.0.0.1")


async def bearer(own: Store, tokens: Tokens, *scopes: Scope, expires: float | None = None) -> Bearer:
    return await known(tokens, await create_token(own, "trivia", scopes, expires=expires))


def dispatcher(own: Store) -> Dispatcher:
    return Dispatcher(own._session, "http")


async def run(dispatcher: Dispatcher, caller: Bearer, operation: str, namespace: str, **members: Any) -> dict[str, Any]:
    row = OPERATIONS[operation]
    return await dispatcher.run(row, namespace, request_of(row.request, members), caller)


# What a token opens -----------------------------------------------------------


async def test_a_token_opens_its_namespace_for_its_rights(own: Store, tokens: Tokens) -> None:
    caller = await bearer(own, tokens, Scope("trivia", "", ALL))

    await run(dispatcher(own), caller, "set", "trivia", key="score", value=1)
    assert await run(dispatcher(own), caller, "get", "trivia", key="score") == {"exists": True, "value": 1}
    assert re.fullmatch(r"trivia#[0-9a-f]{12}", caller.name)


async def test_a_star_opens_every_namespace_but_the_servers_own(own: Store, tokens: Tokens) -> None:
    caller = await bearer(own, tokens, Scope("*", "", (*ALL, "admin")))

    assert caller.may("any-other", "write", [key_span("x")])
    assert not caller.may(OWN_NAMESPACE, "read", [key_span("token/1")])
    assert not caller.may(OWN_NAMESPACE, "admin", [])


async def test_a_prefix_is_a_string_and_a_sibling_that_shares_it_is_inside(own: Store, tokens: Tokens) -> None:
    caller = await bearer(own, tokens, Scope("shared", "team/a", ("read",)))

    assert caller.may("shared", "read", [key_span("team/ab")])
    assert caller.may("shared", "read", [prefix_span("team/a/")])


async def test_each_of_several_scopes_opens_its_own_part(own: Store, tokens: Tokens) -> None:
    caller = await bearer(own, tokens, Scope("shared", "a/", ("read",)), Scope("shared", "b/", ("read",)))

    assert caller.may("shared", "read", [key_span("a/1"), prefix_span("b/")])
    assert not caller.may("shared", "read", [Span("a/", "b0")])


# Attacks on scopes ------------------------------------------------------------

FOLDER = Scope("shared", "team-a/", ALL)

# Attacks with a token for the folder team-a/ of the namespace shared.
TRIES = {
    "a sibling that shares the beginning": ("get", "shared", {"key": "team-ab/x"}),
    "the folder without its stroke": ("get", "shared", {"key": "team-a"}),
    "the key just before": ("get", "shared", {"key": "team-a."}),
    "the key just behind": ("get", "shared", {"key": "team-a0"}),
    "a path that climbs": ("get", "shared", {"key": "../team-b/x"}),
    "another letter case": ("get", "shared", {"key": "Team-a/x"}),
    "a letter that looks the same": ("get", "shared", {"key": "t\u0435am-a/x"}),
    "another namespace": ("get", "other", {"key": "team-a/x"}),
    "a namespace that starts the same": ("get", "shared2", {"key": "team-a/x"}),
    "a star for a namespace": ("get", "*", {"key": "team-a/x"}),
    "the server's own namespace": ("get", OWN_NAMESPACE, {"key": "team-a/x"}),
    "the tokens": ("list", OWN_NAMESPACE, {"prefix": "token/"}),
    "a wider list": ("list", "shared", {"prefix": "team-"}),
    "a list of everything": ("list", "shared", {}),
    "a list that goes on behind": ("list", "shared", {"prefix": "", "after": "team-a/"}),
    "a wider scan": ("scan", "shared", {"prefix": "team"}),
    "a watch of everything": ("watch", "shared", {"pattern": "*"}),
    "a watch of what starts like it": ("watch", "shared", {"pattern": "team-a*"}),
    "the history of another": ("history", "shared", {"key": "team-b/x"}),
    "a delete of another": ("delete", "shared", {"key": "team-b/x"}),
    "a batch with one foreign write": (
        "batch",
        "shared",
        {"writes": [{"op": "put", "key": "team-a/x", "value": 1}, {"op": "put", "key": "team-b/x", "value": 1}]},
    ),
    "a batch that asks after a foreign key": (
        "batch",
        "shared",
        {
            "writes": [{"op": "put", "key": "team-a/x", "value": 1}],
            "guards": [{"key": "team-b/x", "expect": {"absent": True}}],
        },
    ),
    "a foreign lock": ("lock", "shared", {"name": "team-b/job", "ttl": 10}),
    "a fence of a foreign lock": (
        "put",
        "shared",
        {"key": "team-a/x", "value": 1, "fence": {"name": "team-b/job", "token": 1}},
    ),
    "all locks": ("locks", "shared", {}),
    "the outcome of anybody's request": ("outcome", "shared", {"request_id": "1"}),
    "the size of everything": ("status", "shared", {}),
}


@pytest.mark.parametrize(("operation", "namespace", "members"), TRIES.values(), ids=TRIES)
async def test_a_token_for_a_folder_opens_nothing_else(
    own: Store, tokens: Tokens, operation: str, namespace: str, members: dict[str, Any]
) -> None:
    caller = await bearer(own, tokens, FOLDER)
    before = await own.namespace("shared").status()

    with pytest.raises((PermissionDenied, InvalidNamespace)):
        await run(dispatcher(own), caller, operation, namespace, **members)
    assert (await own.namespace("shared").status()).revision == before.revision


@pytest.mark.parametrize(
    ("rights", "operation", "members"),
    [
        (("write", "lock", "reveal"), "list", {"prefix": ""}),
        (("read", "write", "lock"), "get", {"key": "x"}),
        (("read", "write", "lock"), "watch", {"pattern": "x"}),
        (("read", "write", "lock"), "history", {"key": "x"}),
        (("read", "write", "lock"), "take", {"key": "x"}),
        (("read", "lock", "reveal"), "set", {"key": "x", "value": 1}),
        (("read", "lock", "reveal"), "delete", {"key": "x"}),
        (("read", "lock", "reveal", "admin"), "incr", {"key": "x"}),
        (("read", "write", "reveal"), "lock", {"name": "x", "ttl": 1}),
        (("admin",), "get", {"key": "x"}),
    ],
)
async def test_no_right_brings_another_with_it(
    own: Store, tokens: Tokens, rights: tuple[Any, ...], operation: str, members: dict[str, Any]
) -> None:
    caller = await bearer(own, tokens, Scope("shared", "", rights))

    with pytest.raises(PermissionDenied):
        await run(dispatcher(own), caller, operation, "shared", **members)


@pytest.mark.parametrize("pattern", ["team-a/*", "team-a/x"])
async def test_a_watch_within_the_folder_is_let_through(own: Store, tokens: Tokens, pattern: str) -> None:
    caller = await bearer(own, tokens, FOLDER)

    assert caller.may("shared", "read", [pattern_span(pattern)])


@pytest.mark.parametrize(
    ("scope", "error"),
    [
        (Scope(OWN_NAMESPACE, "", ("read",)), InvalidValue),
        (Scope("tri*", "", ("read",)), InvalidNamespace),
        (Scope("../x", "", ("read",)), InvalidNamespace),
        (Scope("", "", ("read",)), InvalidNamespace),
        (Scope("x", "a\0b", ("read",)), InvalidKey),
        (Scope("x", "", ()), InvalidValue),
        (Scope("x", "", ("root",)), InvalidValue),  # type: ignore[arg-type]
    ],
)
async def test_a_scope_that_means_nothing_is_not_granted(own: Store, scope: Scope, error: type[Exception]) -> None:
    with pytest.raises(error):
        await create_token(own, "x", [scope])
    assert await list_tokens(own) == {}


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "x" * 65, "é", 'a"b'])
async def test_a_name_that_could_forge_a_line_of_the_log_is_refused(own: Store, name: str) -> None:
    with pytest.raises(InvalidValue):
        await create_token(own, name, [FOLDER])


async def test_a_token_has_some_scopes_and_not_very_many(own: Store) -> None:
    for scopes in ([], [FOLDER] * (access.SCOPES_MAX + 1)):
        with pytest.raises(InvalidValue):
            await create_token(own, "x", scopes)


# Attacks on the token itself --------------------------------------------------


async def forged(own: Store, issued: Issued) -> dict[str, str]:
    id, secret = issued.id, issued.secret.rpartition("_")[2]
    other = await create_token(own, "other", [FOLDER])
    return {
        "nothing": "",
        "the id alone": id,
        "without a secret": f"lmp_{id}_",
        "the hash for the secret": f"lmp_{id}_{issued.token.hash}",
        "another's secret": f"lmp_{id}_{other.secret.rpartition('_')[2]}",
        "its secret under another id": f"lmp_{other.id}_{secret}",
        "an unknown id": f"lmp_{'0' * 12}_{secret}",
        "the last letter changed": issued.secret[:-1] + ("0" if issued.secret[-1] != "0" else "1"),
        "capital letters": f"lmp_{id}_{secret.upper()}" if secret.upper() != secret else "lmp",
        "one letter more": f"{issued.secret}0",
        "a newline behind": f"{issued.secret}\n",
        "a space before": f" {issued.secret}",
        "the scheme before": f"Bearer {issued.secret}",
        "a path for an id": f"lmp_../{id}_{secret}",
        "a star for an id": f"lmp_*_{secret}",
        "an id of another alphabet": f"lmp_{chr(0x660) * 12}_{secret}",
        "U+0000": f"{issued.secret}\0",
        "a lone surrogate": f"{issued.secret}\udc80",
        "no digest": f"lmp_{id}_{'-' * 64}",
        "very long": f"lmp_{id}_{'a' * 1_000_000}",
    }


async def test_a_forged_token_is_refused_and_never_told_why(own: Store, tokens: Tokens) -> None:
    issued = await create_token(own, "trivia", [FOLDER])
    await known(tokens, issued)

    for what, token in (await forged(own, issued)).items():
        with pytest.raises(Unauthenticated) as refused:
            await tokens.caller_of(token, "10.0.0.1")
        assert str(refused.value) == "this token is not valid", what


async def test_without_a_token_nobody_is_let_in(tokens: Tokens) -> None:
    with pytest.raises(Unauthenticated, match="needs a token"):
        await tokens.caller_of(None, None)


async def test_an_expired_token_is_refused_by_the_engines_clock(own: Store, tokens: Tokens, clock: ManualClock) -> None:
    issued = await create_token(own, "trivia", [FOLDER], expires=60)
    caller = await known(tokens, issued)

    clock.advance(59.999)
    assert caller.is_valid()
    clock.advance(0.001)
    assert not caller.is_valid()
    with pytest.raises(Unauthenticated, match="'trivia' is expired"):
        await tokens.caller_of(issued.secret, None)


async def test_a_token_ends_by_the_clock_of_the_engine_and_not_of_the_host() -> None:
    """The host's clock may be wrong: what counts is the engine's, carried on by the host's monotonic one."""
    engine_time, host_time = ManualClock(2_000_000_000), ManualClock(1_000_000_000)
    async with limpet.open("memory:", namespace=OWN_NAMESPACE, clock=engine_time, sweep=False) as own:
        own._session.clock = host_time
        issued = await create_token(own, "trivia", [FOLDER], expires=60)
        tokens = Tokens(own._session)
        await tokens.start()
        caller = await tokens.caller_of(issued.secret, None)

        host_time.advance(60)
        assert not caller.is_valid()
        # The engine's clock did not move meanwhile, and is read again.
        await until(caller.is_valid)
        await tokens.close()


async def test_a_revoked_token_is_refused_within_moments_also_where_a_stream_is_open(
    own: Store, tokens: Tokens
) -> None:
    issued = await create_token(own, "trivia", [FOLDER])
    caller = await known(tokens, issued)
    assert caller.is_valid()

    await revoke_token(own, issued.id)
    await until(lambda: not caller.is_valid())
    with pytest.raises(Unauthenticated, match="not valid"):
        await tokens.caller_of(issued.secret, None)


async def test_a_rotated_token_has_two_secrets_until_the_grace_is_over(
    own: Store, tokens: Tokens, clock: ManualClock
) -> None:
    first = await create_token(own, "trivia", [FOLDER])
    before = await known(tokens, first)
    second = await rotate_token(own, first.id, grace=60)
    after = await known(tokens, second)

    assert second.id == first.id
    assert second.secret != first.secret
    assert (await tokens.caller_of(first.secret, None)).may("shared", "read", [prefix_span("team-a/")])
    assert before.is_valid()
    clock.advance(60)
    assert not before.is_valid()
    assert after.is_valid()
    with pytest.raises(Unauthenticated, match="'trivia' is rotated"):
        await tokens.caller_of(first.secret, None)


async def test_a_second_rotation_ends_the_first_secret_at_once(own: Store, tokens: Tokens) -> None:
    first = await create_token(own, "trivia", [FOLDER])
    await rotate_token(own, first.id, grace=3600)
    third = await rotate_token(own, first.id, grace=3600)
    await known(tokens, third)

    with pytest.raises(Unauthenticated, match="not valid"):
        await tokens.caller_of(first.secret, None)


async def test_a_leaked_secret_is_rotated_without_grace(own: Store, tokens: Tokens) -> None:
    first = await create_token(own, "trivia", [FOLDER])
    await known(tokens, first)
    await known(tokens, await rotate_token(own, first.id))

    with pytest.raises(Unauthenticated):
        await tokens.caller_of(first.secret, None)


async def test_rotation_does_not_bring_back_what_has_expired(own: Store, clock: ManualClock) -> None:
    issued = await create_token(own, "trivia", [FOLDER], expires=10)
    clock.advance(10)

    with pytest.raises(InvalidValue, match="has expired"):
        await rotate_token(own, issued.id)
    assert (await rotate_token(own, issued.id, expires=10)).token.expires_ms == clock.after(10)


async def test_what_is_not_there_is_neither_revoked_nor_rotated(own: Store) -> None:
    for change in (revoke_token(own, "0" * 12), rotate_token(own, "0" * 12)):
        with pytest.raises(NotFound):
            await change


async def test_a_token_ends_after_a_time_that_is_one(own: Store) -> None:
    with pytest.raises(InvalidTTL):
        await create_token(own, "x", [FOLDER], expires=-1)


async def test_what_this_release_cannot_read_opens_nothing(own: Store, tokens: Tokens) -> None:
    """A later release may add a member that narrows a token; a server that ignored it would grant more."""
    issued = await create_token(own, "trivia", [FOLDER])
    caller = await known(tokens, issued)
    kept = await own.get(f"token/{issued.id}")

    await own.put(f"token/{issued.id}", {**kept, "only_from": ["10.0.0.0/8"]})
    await until(lambda: not caller.is_valid())
    assert await list_tokens(own) == {}


async def test_a_caller_whose_scopes_were_changed_is_to_come_again(own: Store, tokens: Tokens) -> None:
    issued = await create_token(own, "trivia", [FOLDER])
    caller = await known(tokens, issued)
    kept = await own.get(f"token/{issued.id}")

    await own.put(f"token/{issued.id}", {**kept, "scopes": [{"namespace": "shared", "rights": ["read"]}]})
    await until(lambda: not caller.is_valid())
    assert not (await tokens.caller_of(issued.secret, None)).may("shared", "write", [key_span("team-a/x")])


# How servers hear of them -----------------------------------------------------


async def test_a_server_that_is_not_started_or_is_closed_lets_nobody_in(own: Store) -> None:
    issued = await create_token(own, "trivia", [FOLDER])
    tokens = Tokens(own._session)
    with pytest.raises(limpet.errors.Closed):
        await tokens.caller_of(issued.secret, None)

    await tokens.start()
    caller = await tokens.caller_of(issued.secret, None)
    await tokens.close()
    assert not caller.is_valid()
    with pytest.raises(limpet.errors.Closed):
        await tokens.caller_of(issued.secret, None)


async def test_a_store_that_is_closed_lets_nobody_in_any_more() -> None:
    own = await limpet.open("memory:", namespace=OWN_NAMESPACE, sweep=False)
    issued = await create_token(own, "trivia", [FOLDER])
    tokens = Tokens(own._session)
    await tokens.start()
    caller = await tokens.caller_of(issued.secret, None)

    await own.close()
    await until(lambda: not caller.is_valid())
    await tokens.close()


async def test_where_the_log_was_trimmed_everything_is_loaded_again(
    own: Store, tokens: Tokens, clock: ManualClock
) -> None:
    """A server that cannot follow the log must not go on with the tokens it knew."""
    issued = await create_token(own, "trivia", [FOLDER])
    caller = await known(tokens, issued)

    # The hub of this process follows no more, as when the log was trimmed behind it.
    hub = own._session.hub(OWN_NAMESPACE)
    assert hub._follower is not None
    hub._follower.cancel()
    hub._finish(limpet.errors.Compacted("it was trimmed"))
    await revoke_token(own, issued.id)
    await until(lambda: clock.sleepers >= 2)
    clock.advance(access.RETRY_S)
    await until(lambda: not caller.is_valid())
    later = await create_token(own, "later", [FOLDER])
    assert (await known(tokens, later)).is_valid()


@pytest.mark.parametrize("engine", ["postgres", "redis", "nats"])
async def test_tokens_work_alike_on_every_engine(engine: str, tmp_path: Path) -> None:
    """Made by one process, used at a server that has its own connection, revoked by the first."""
    url = url_of(engine, tmp_path)
    async with (
        limpet.open(url, namespace=OWN_NAMESPACE, sweep=False) as own,
        limpet.open(url, namespace=OWN_NAMESPACE, sweep=False) as served,
    ):
        tokens = Tokens(served._session)
        await tokens.start()
        first = await create_token(own, "trivia", [FOLDER], expires=3600)
        caller = await known(tokens, first)
        assert caller.may("shared", "read", [key_span("team-a/x")])

        second = await rotate_token(own, first.id, grace=600)
        assert (await known(tokens, second)).is_valid()
        assert caller.is_valid()

        await revoke_token(own, first.id)
        await until(lambda: not caller.is_valid())
        assert first.id not in await list_tokens(own)
        await tokens.close()


# Secrets stay secret -----------------------------------------------------------


def test_a_secret_has_256_random_bits() -> None:
    secret = access._new_secret("0" * 12)

    assert len(bytes.fromhex(secret.rpartition("_")[2])) == 32
    assert len({access._new_secret("0" * 12) for _ in range(1000)}) == 1000


def test_secrets_are_compared_in_constant_time_and_all_of_them() -> None:
    """Both hashes are compared before anything is decided, for an unknown token as well."""
    source = inspect.getsource(access.Token.accepts)
    caller = inspect.getsource(access.Tokens.caller_of)

    assert source.count("hmac.compare_digest(") == 2
    assert source.rindex("hmac.compare_digest(") < source.index("if not")
    assert not re.search(r"(?:==|!=) *(?:self\.hash|digest|former\.hash)", source + caller)
    assert ".get(form[1], _UNKNOWN_TOKEN)" in caller
    assert len(access._UNKNOWN_TOKEN.hash) == len(access._digest("x"))


async def test_no_secret_is_in_a_repr_an_error_or_the_log(
    own: Store, tokens: Tokens, caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    caplog.set_level(logging.DEBUG)
    issued = await create_token(own, "trivia", [FOLDER], expires=60)
    caller = await known(tokens, issued)
    rotated = await rotate_token(own, issued.id, grace=10)
    await known(tokens, rotated)
    clock.advance(60)
    texts = [
        repr(thing) for thing in (issued, issued.token, rotated, rotated.token, rotated.token.former, caller, tokens)
    ]
    for token in (issued.secret, rotated.secret, *(await forged(own, issued)).values()):
        with pytest.raises(Unauthenticated) as refused:
            await tokens.caller_of(token, "10.0.0.1\nforged")
        texts += [str(refused.value), repr(refused.value)]

    text = "\n".join([*texts, caplog.text])
    for secret in (issued.secret, rotated.secret):
        assert secret.rpartition("_")[2] not in text
    assert issued.token.hash not in text
    assert r'client="10.0.0.1\nforged"' in caplog.text


async def test_a_database_holds_the_hash_and_not_the_secret(tmp_path: Path) -> None:
    async with limpet.open(f"sqlite:///{tmp_path}/state.db", namespace=OWN_NAMESPACE) as own:
        issued = await create_token(own, "trivia", [FOLDER])
        await rotate_token(own, issued.id, grace=60)
    with sqlite3.connect(tmp_path / "state.db") as database:
        dump = "\n".join(
            map(repr, (row for table in tables(database) for row in database.execute(f"SELECT * FROM {table}")))
        )
    database.close()

    assert issued.token.hash in dump
    assert issued.secret.rpartition("_")[2] not in dump


def tables(database: sqlite3.Connection) -> list[str]:
    return [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
