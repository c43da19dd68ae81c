"""The commands for semantic entries: the audit trail, and dead letters."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

import limpet
from limpet.semantic.store import Audit, DeadLetters, Envelope, Escalated, RetryPolicy, SemanticStore
from tests.cli.support import Limpet

KEY = "tenant/acme/project/docs/flag"
FLAG = {"purpose": "feature_flag", "producer": "console"}
SECRET_VALUE = "s3cret"


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Limpet, Path]:
    """A store with a trail of two rows and one dead letter."""
    file = tmp_path / "state.db"

    async def prepare() -> None:
        async with limpet.open(f"sqlite:///{file}") as store:
            kept = SemanticStore(
                store,
                audit=Audit(b"k" * 32, key_id="one"),
                policy=RetryPolicy(conflict_pauses_s=()),
                dead_letters=DeadLetters.beside(store),
            )
            await kept.kv_put(KEY, {"n": 1}, writer="alice:rollout", semantics=FLAG)

            async def too_late(found: Envelope | None) -> dict[str, str]:
                await kept.kv_put(KEY, {"n": 2}, writer="bob:rollback", semantics=FLAG)
                return {"token": SECRET_VALUE}

            with pytest.raises(Escalated):
                await kept.advance(KEY, too_late, writer="alice:rollout", semantics=FLAG)

    asyncio.run(prepare())
    monkeypatch.setenv("LIMPET_AUDIT_KEYS", f"one:{(b'k' * 32).hex()}")
    return Limpet(f"sqlite:///{file}"), file


def test_a_sound_trail_is_verified_sealed_and_shown(prepared: tuple[Limpet, Path]) -> None:
    run, _ = prepared
    before = run.json("audit", "verify")
    assert run("audit", "seal").stdout == "2 sealed\n"
    assert run.json("audit", "seal") == {"sealed": 0}
    after = run.json("audit", "verify")

    assert (before["sound"], before["sealed"], before["unsealed"]) == (True, 0, 2)
    assert (after["sound"], after["sealed"], after["unsealed"]) == (True, 2, 0)
    assert run("audit", "verify", "--anchor", after["anchor"]).exit_code == 0
    rows = run.documents("audit", "show", "tenant/acme/")
    assert [(row["seq"], row["op"], row["writer"]) for row in rows] == [
        (1, "put", "alice:rollout"),
        (2, "put", "bob:rollback"),
    ]
    lines = run("audit", "show").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["1", "2"]
    assert run("audit", "show", "tenant/other/").stdout == ""


def test_a_trail_that_was_changed_exits_with_6(prepared: tuple[Limpet, Path]) -> None:
    run, file = prepared
    database = sqlite3.connect(file)
    with database:
        database.execute("DELETE FROM limpet_entries WHERE family = 'audit' AND CAST(key AS TEXT) LIKE 'new/%2'")
    database.close()

    result = run("audit", "verify")

    assert result.exit_code == 6
    assert "missing      head/" in result.stdout
    assert "sound        no\n" in result.stdout
    wrong = run("audit", "verify", "--anchor", "9@x")
    assert (wrong.exit_code, "rolled_back" in wrong.stdout) == (6, True)


def test_a_trail_is_pruned_and_says_so(prepared: tuple[Limpet, Path]) -> None:
    run, _ = prepared
    run("audit", "seal")
    (letter,) = run.documents("deadletters", "list")

    assert run("audit", "prune", "--before", "1d").stdout == "0 removed\n"
    assert run("audit", "prune", "--before", "2999-01-01", "--dry-run").stdout.startswith("2 would be removed, up to ")
    assert run.json("audit", "verify")["pruned"] == 0
    pruned = run.json("audit", "prune", "--before", "0s")
    assert (pruned["rows"], pruned["unaudited"], pruned["dry_run"]) == (2, 0, False)
    report = run("audit", "verify").stdout
    assert f"pruned       2, up to {pruned['to']}\n" in report
    assert "sound        yes\n" in report
    assert run("audit", "show").stdout == ""
    # Its rows are gone, and it is audited as before.
    run("deadletters", "replay", letter["letter"], "--onto", "2")
    report = run.json("audit", "verify")
    assert (report["sound"], report["pruned"], report["unsealed"]) == (True, 2, 1)


def test_what_is_neither_an_age_nor_a_date_is_refused(prepared: tuple[Limpet, Path]) -> None:
    run, _ = prepared
    for wrong in ("soon", "2026-13-01", "", "9" * 30):
        result = run("audit", "prune", "--before", wrong)
        assert result.exit_code == 2
        assert "neither an age" in result.stderr


def test_a_trail_that_was_changed_is_not_pruned(prepared: tuple[Limpet, Path]) -> None:
    run, file = prepared
    run("audit", "seal")
    database = sqlite3.connect(file)
    with database:
        database.execute("DELETE FROM limpet_entries WHERE family = 'audit' AND CAST(key AS TEXT) LIKE 'sealed/%2'")
    database.close()

    result = run("audit", "prune", "--before", "0s")

    assert result.exit_code == 6
    assert "nothing was pruned" in result.stderr
    assert len(run.documents("audit", "show")) == 1


def test_without_the_keys_nothing_is_verified(prepared: tuple[Limpet, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = prepared
    monkeypatch.delenv("LIMPET_AUDIT_KEYS")
    (letter,) = run.documents("deadletters", "list")
    for words in (
        ("audit", "verify"),
        ("audit", "seal"),
        ("audit", "prune", "--before", "1d"),
        ("deadletters", "replay", letter["letter"]),
    ):
        result = run(*words)
        assert result.exit_code == 7
        assert "LIMPET_AUDIT_KEYS" in result.stderr


def test_a_letter_is_listed_shown_replayed_and_dropped(prepared: tuple[Limpet, Path]) -> None:
    run, _ = prepared
    (listed,) = run.documents("deadletters", "list")
    name = listed["letter"]
    line = run("deadletters", "list").stdout
    shown = run("deadletters", "show", name)

    assert line.split("\t")[0] == name
    assert line.endswith(f"version_conflict\t1\t{KEY}\n")
    assert "foundVersion     2\n" in shown.stdout
    assert SECRET_VALUE not in line + shown.stdout + str(listed)
    assert run.json("deadletters", "show", name, "--value")["value"] == {"token": SECRET_VALUE}

    refused = run("deadletters", "replay", name)
    assert refused.exit_code == 4
    assert "expected version 1, found version 2" in refused.stderr
    assert SECRET_VALUE not in refused.stderr + refused.stdout
    replayed = run.json("deadletters", "replay", name, "--onto", "2")
    assert (replayed["version"], "value" in replayed) == (3, False)
    assert run.documents("deadletters", "list") == []
    assert run.json("audit", "verify")["sound"] is True

    for words in (("show", name), ("drop", name), ("replay", name)):
        gone = run("deadletters", *words)
        assert (gone.exit_code, f"no dead letter '{name}'" in gone.stderr) == (3, True)


def test_a_letter_can_be_dropped(prepared: tuple[Limpet, Path]) -> None:
    run, _ = prepared
    (listed,) = run.documents("deadletters", "list")
    assert run.json("deadletters", "drop", listed["letter"])["dropped"] is True
    assert run("deadletters", "list").stdout == ""
    assert run("--url", "sqlite:///nowhere.db", "deadletters", "list").exit_code == 3


def test_a_semantic_verb_is_called_by_its_name_and_leaves_a_row(
    prepared: tuple[Limpet, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = prepared
    put = json.dumps(
        {"key": KEY, "value": {"n": 3}, "lastWriter": "carol:fix", "semantics": FLAG, "expectedVersion": 2}
    )

    assert run.json("call", "kv_put", put)["version"] == 3
    late = run("call", "kv_put", put)
    assert (late.exit_code, SECRET_VALUE in late.stderr) == (4, False)
    assert run.documents("audit", "show")[-1]["writer"] == "carol:fix"
    assert run("audit", "verify").exit_code == 0

    monkeypatch.delenv("LIMPET_AUDIT_KEYS")
    assert run.json("call", "kv_get", json.dumps({"key": KEY}))["value"] == {"n": 3}
    assert run("call", "kv_put", put).exit_code == 7
