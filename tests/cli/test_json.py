"""The shapes of ``--json``, held to the table of docs/reference/cli.md, member by member."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import limpet
from tests.cli.support import Limpet
from tests.docs_support import ROOT

TABLE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").partition("\n## JSON\n")[2]


def members_of(document: str) -> list[str]:
    """The members that the reference names for a document, in its order."""
    (row,) = re.findall(rf"^\| {re.escape(document)} \| (.*) \|$", TABLE, re.MULTILINE)
    return re.findall(r"`(\w+)`", row)


ENTRY = members_of("`get`")
WITHOUT_VALUE = [name for name in ENTRY if name != "value"]
EVENT = members_of("each line of `watch` and `history`")


def test_get_prints_the_whole_entry(run: Limpet) -> None:
    run("put", "k", '{"a": 1}', "--ttl", "1h")

    entry = run.json("get", "k")

    assert list(entry) == ENTRY
    assert (entry["key"], entry["kind"], entry["value"]) == ("k", "json", {"a": 1})
    assert (entry["version"], entry["revision"], entry["created_revision"]) == (1, 1, 1)
    assert (entry["size_bytes"], entry["meta"]) == (7, {})
    lasts = datetime.fromisoformat(entry["expires_at"]) - datetime.fromisoformat(entry["created_at"])
    assert lasts.total_seconds() == 3600
    assert entry["updated_at"] == entry["created_at"]


def test_writes_print_the_entry_without_its_value(run: Limpet) -> None:
    assert list(run.json("put", "k", "1")) == WITHOUT_VALUE
    assert run.json("put", "k", "2")["version"] == 2
    assert list(run.json("field", "set", "r", "a=1")) == WITHOUT_VALUE
    swapped = run.json("field", "swap", "r", "a", "1", "2")
    assert list(swapped) == WITHOUT_VALUE
    assert (swapped["kind"], swapped["version"]) == ("record", 2)


def test_ls_prints_a_document_a_line(run: Limpet) -> None:
    run("put", "a", "1")
    run("put", "b", "2")

    documents = run.documents("ls")

    assert [list(document) for document in documents] == [WITHOUT_VALUE] * 2
    assert [document["key"] for document in documents] == ["a", "b"]
    with_values = run.documents("ls", "--values")
    assert [list(document) for document in with_values] == [ENTRY] * 2
    assert [document["value"] for document in with_values] == [1, 2]
    assert run.documents("ls", "--long") == documents
    assert run.documents("ls", "none") == []


def test_field_get_prints_the_fields(run: Limpet) -> None:
    run("field", "set", "r", "a=1", "b=two")

    everything, one = run.json("field", "get", "r"), run.json("field", "get", "r", "b")

    assert list(everything) == list(one) == [*WITHOUT_VALUE, "fields"]
    assert everything["fields"] == {"a": 1, "b": "two"}
    assert one["fields"] == {"b": "two"}


def test_del_and_incr_print_what_they_did(run: Limpet) -> None:
    assert run.json("incr", "n", "5") == {"key": "n", "value": 5}
    assert list(run.json("incr", "n")) == members_of("`incr`")
    assert run.json("del", "n") == {"key": "n", "deleted": True}
    assert members_of("`del`") == ["key", "deleted"]


def test_history_prints_a_document_for_each_change(run: Limpet, url: str) -> None:
    with limpet.sync.open(url) as store:
        entry = store.put("k", 1, meta={"by": "alice"}, request_id="order-17")
        store.touch("k", 3600)
        store.delete("k")
        prefix = f"{store.status().store_id}:default:1:"
    run("field", "set", "k", "a=1")
    run("field", "set", "k", "a=2")

    events = run.documents("history", "k")

    assert [list(event) for event in events] == [EVENT] * 5
    assert [event["op"] for event in events] == ["put", "touch", "delete", "patch", "patch"]
    put, touch, delete, _, patch = events
    assert (put["key"], put["kind"], put["version"], put["value"]) == ("k", "json", 1, 1)
    assert (put["revision"], put["commit"]) == (1, 1)
    assert put["position"].startswith(f"{prefix}1-")
    assert (put["cause"], put["meta"]) == ("order-17", {"by": "alice"})
    assert datetime.fromisoformat(put["at"]) == entry.updated_at
    assert datetime.fromisoformat(touch["at"]) >= entry.updated_at
    assert touch["value"] is None
    assert touch["expires_at"] is not None
    assert datetime.fromisoformat(delete["at"]) >= datetime.fromisoformat(touch["at"])
    assert (delete["value"], delete["version"]) == (None, 1)
    assert (patch["kind"], patch["value"], patch["version"]) == ("record", {"a": 2}, 2)


def test_an_expiry_tells_when_it_was_due_and_when_it_was_swept(run: Limpet, url: str, file: Path) -> None:
    clock = limpet.ManualClock()
    with limpet.sync.open(url, clock=clock, sweep=False) as store:
        entry = store.put("k", 1, ttl=1)
        clock.advance(5)
        store.sweep()

    _, expired = run.documents("history", "k")

    assert expired["op"] == "expire"
    assert entry.expires_at is not None
    assert datetime.fromisoformat(expired["expires_at"]) == entry.expires_at
    assert datetime.fromisoformat(expired["at"]) == entry.created_at + timedelta(seconds=5)


def test_watch_prints_a_document_for_each_event(run: Limpet) -> None:
    run("put", "config/a", "1")
    run("put", "other", "2")

    first, synced = run.documents("watch", "config/*", "--initial", "--count", "2")

    assert list(first) == list(synced) == EVENT
    assert (first["op"], first["key"], first["value"], first["position"]) == ("put", "config/a", 1, None)
    assert (synced["op"], synced["key"], synced["version"], synced["meta"]) == ("synced", "", None, None)
    run("put", "config/b", "3")
    (resumed,) = run.documents("watch", "--after", synced["position"], "--count", "1")
    assert (resumed["op"], resumed["key"]) == ("put", "config/b")


def test_stat_prints_one_document(run: Limpet, url: str) -> None:
    run("put", "k", "1")
    with limpet.sync.open(url) as store, store.lock("nightly", ttl=30, holder="worker-7") as lock:
        document, status, token = run.json("stat"), store.status(), lock.token

    assert list(document) == members_of("`stat`")
    (held,) = document.pop("locks")
    assert list(held) == members_of("each of `locks`")
    assert (held["name"], held["holder"], held["token"]) == ("nightly", "worker-7", token)
    assert 0 < held["remaining"] <= 30
    assert document == {
        "url": url,
        "namespace": "default",
        "engine": "sqlite",
        "durability": "disk",
        "encrypted": False,
        "keys": 1,
        "bytes": 2,
        "revision": status.revision,
        "log_changes": status.log_changes,
        "log_bytes": status.log_bytes,
        "log_after": 0,
        "store_id": status.store_id,
        "epoch": 1,
    }


def test_doctor_prints_a_document_for_each_check(run: Limpet) -> None:
    run("put", "k", "1")

    documents = run.documents("doctor")

    assert [list(document) for document in documents] == [members_of("each line of `doctor`")] * len(documents)
    assert {document["level"] for document in documents} == {"ok"}


@pytest.mark.parametrize(
    ("words", "code", "details"),
    [
        (["get", "nothing"], "not_found", {"key": "nothing"}),
        (["field", "get", "r", "nothing"], "not_found", {"key": "r"}),
        (["history", "nothing"], "not_found", {"key": "nothing"}),
        (
            ["put", "k", "2", "--if-version", "7"],
            "conflict",
            {"key": "k", "expected": "version 7", "actual_version": 1, "actual_revision": 1, "reason": "guard"},
        ),
        (
            ["put", "new", "2", "--if-version", "7"],
            "conflict",
            {"key": "new", "expected": "version 7", "actual_version": None, "actual_revision": None, "reason": "guard"},
        ),
        (["put", "", "1"], "invalid_key", {"key": ""}),
        (["incr", "r"], "type_mismatch", {"key": "r", "expected": "an integer", "found": "a record", "path": None}),
        (["put", "k", "x" * 1_000_001], "value_too_large", {"key": "k", "size_bytes": 1_000_003, "limit_bytes": 10**6}),
        (["watch", "--after", "99"], "compacted", {"oldest": None}),
    ],
)
def test_an_error_is_a_document_on_standard_error(
    run: Limpet, words: list[str], code: str, details: dict[str, Any]
) -> None:
    run("put", "k", "1")
    run("field", "set", "r", "a=1")

    result = run(*words, "--json")

    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    document = json.loads(line)
    assert list(document) == members_of("an error, on standard error")
    assert (document["error"], document["exit_code"], document["details"]) == (code, result.exit_code, details)
    assert (document["retryable"], document["outcome"]) == (False, "rejected")
    assert document["message"]
    assert document["advice"] is None or document["advice"].endswith(".")


def test_a_missing_store_is_an_error_without_a_key(run: Limpet) -> None:
    document = json.loads(run("--json", "get", "k").stderr)

    assert (document["error"], document["details"]) == ("not_found", {})


def test_bytes_are_distinct_from_an_object_that_looks_like_them(run: Limpet, url: str) -> None:
    with limpet.sync.open(url) as store:
        store.put("bytes", b"\xff")
        store.put("json", {"$bytes": "/w=="})
        store.record("r").put(
            {"raw": b"\xff", "object": {"$bytes": "/w=="}, "plain": {"a": 1}, "empty": {}, "two": {"$a": 1, "b": 2}}
        )

    assert run.json("get", "bytes")["value"] == run.json("get", "json")["value"] == {"$bytes": "/w=="}
    assert [run.json("get", key)["kind"] for key in ("bytes", "json", "r")] == ["bytes", "json", "record"]
    assert run.json("get", "r")["value"] == {
        "raw": {"$bytes": "/w=="},
        "object": {"$json": {"$bytes": "/w=="}},
        "plain": {"a": 1},
        "empty": {},
        "two": {"$a": 1, "b": 2},
    }
