"""``limpet del`` of several keys, and what it would delete."""

from __future__ import annotations

import pytest

from tests.cli.support import Limpet


@pytest.fixture(autouse=True)
def _stored(run: Limpet) -> None:
    for key in ("job/1", "job/2", "other"):
        run("put", key, "1")


def test_several_keys_are_deleted_in_one_batch(run: Limpet) -> None:
    revision = run.json("stat")["revision"]

    assert run("del", "job/1", "other", "job/1").exit_code == 0

    assert run("ls").stdout == "job/2\n"
    assert run.json("stat")["revision"] == revision + 2


def test_a_missing_key_does_not_keep_the_others(run: Limpet) -> None:
    result = run("del", "job/1", "missing", "job/2")

    assert result.exit_code == 3
    assert "key 'missing' not found" in result.stderr
    assert "The other keys were deleted" in result.stderr
    assert run("ls").stdout == "other\n"


def test_json_names_each_key_that_was_deleted(run: Limpet) -> None:
    assert run.documents("del", "job/1", "other") == [
        {"key": "job/1", "deleted": True},
        {"key": "other", "deleted": True},
    ]


@pytest.mark.parametrize(
    ("words", "shown"),
    [(("job/1", "missing"), "job/1\n"), (("job/", "--prefix"), "job/1\njob/2\n"), (("none/", "--prefix"), "")],
)
def test_a_dry_run_shows_the_keys_and_deletes_none(run: Limpet, words: tuple[str, ...], shown: str) -> None:
    result = run("del", *words, "--dry-run")

    assert (result.exit_code, result.stdout) == (0, shown)
    assert run("ls").stdout == "job/1\njob/2\nother\n"


def test_a_condition_goes_with_one_key(run: Limpet) -> None:
    for words in (("job/1", "job/2", "--if-version", "1"), ("job/", "--prefix", "--request-id", "once")):
        result = run("del", *words)
        assert result.exit_code == 2
        assert "go with one KEY" in result.stderr
    assert run("ls").stdout == "job/1\njob/2\nother\n"


def test_more_keys_than_a_batch_holds(run: Limpet) -> None:
    keys = [f"many/{number:03}" for number in range(130)]
    for key in keys[:2] + keys[-2:]:
        run("put", key, "1")

    result = run("del", *keys)

    assert result.exit_code == 3
    assert "and 125 more keys not found" in result.stderr
    assert run("ls", "many/").stdout == ""
