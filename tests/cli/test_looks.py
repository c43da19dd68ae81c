"""``limpet stat``, ``top`` and ``locks``: what an operator looks at."""

from __future__ import annotations

import limpet.sync
from tests.cli.support import Limpet, looked_at


def test_stat_lists_every_namespace(run: Limpet) -> None:
    run("-n", "one", "put", "k", "1")
    run("-n", "two", "put", "k", "1")
    run("-n", "two", "put", "k", "2")

    listed = {document["namespace"]: document for document in run.documents("stat", "--all")}

    assert {name: (one["keys"], one["revision"]) for name, one in listed.items()} == {"one": (1, 1), "two": (1, 2)}
    assert run("stat", "--all").stdout == "1\t2\t1\t1\tone\n1\t2\t2\t2\ttwo\n"


def test_stat_finds_the_largest_folders(run: Limpet, url: str) -> None:
    with limpet.sync.open(url) as store:
        for number in range(30):
            store.put(f"folder{number:02}/only", 1)
        for number in range(5):
            store.put(f"large/{number}", 1)

    lines = run("stat", "--prefixes").stdout.splitlines()

    assert lines[0] == "5\tlarge/"
    assert len(lines) == 20


def test_stat_finds_what_expires_soon(run: Limpet) -> None:
    for key, ttl in (("late", "2h"), ("second", "9m"), ("first", "5m")):
        run("put", key, "1", "--ttl", ttl)
    run("put", "never", "1")

    assert [one["key"] for one in run.documents("stat", "--expiring", "10m")] == ["first", "second"]
    assert run("stat", "--expiring", "1s").stdout == ""
    assert run("stat", "--all", "--prefixes").exit_code == 2


def test_locks_shows_who_holds_which(run: Limpet, url: str) -> None:
    with limpet.sync.open(url) as store:
        with store.lock("deploy/web", ttl=60, holder="alice") as web, store.lock("nightly", ttl=60, holder="bob"):
            listed = run.documents("locks")
            assert [(one["name"], one["holder"]) for one in listed] == [("deploy/web", "alice"), ("nightly", "bob")]
            (line,) = run("locks", "deploy/").stdout.splitlines()
            token, remaining, *names = line.split("\t")
            assert (token, names) == (str(web.token), ["alice", "deploy/web"])
            assert 50 < float(remaining.removesuffix("s")) <= 60
        assert run("locks").stdout == ""


def test_top_counts_the_changes_of_each_look(run: Limpet, url: str) -> None:
    run("-n", "idle", "put", "k", "1")
    with limpet.sync.open(url, namespace="busy") as store:
        store.put("k", 1)

        looks = run.documents("top", "--count", "2", "--interval", "50ms")

    assert [one["namespace"] for one in looks] == ["busy", "idle"] * 2
    assert {one["changes_per_second"] for one in looks} == {0.0}
    assert looks[0]["keys"] == 1


def test_top_draws_each_look_anew_on_a_terminal(run: Limpet, url: str) -> None:
    run("put", "k", "1")

    code, screen = looked_at("--url", url, "top", "--count", "2", "--interval", "50ms")

    assert code == 0
    assert screen.count("\x1b[2J") == 2
    assert "CHANGES/S" in screen
    assert "1 namespace," in screen
