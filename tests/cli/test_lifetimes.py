"""``limpet touch``, ``persist`` and ``take``."""

from __future__ import annotations

import pytest

from tests.cli.support import Limpet


def test_a_touch_changes_the_expiry_and_nothing_else(run: Limpet) -> None:
    run("put", "session", '"open"')
    before = run.json("get", "session")

    touched = run.json("touch", "session", "30m")

    assert touched["expires_at"] is not None
    assert (touched["version"], touched["revision"]) == (before["version"], before["revision"] + 1)
    assert run("get", "session").stdout == '"open"\n'
    assert run.json("persist", "session")["expires_at"] is None


def test_a_take_prints_the_value_once(run: Limpet) -> None:
    run("put", "invitation", "ada")

    assert run("take", "invitation", "--raw").stdout == "ada"
    result = run("take", "invitation")
    assert result.exit_code == 3
    assert "'invitation'" in result.stderr


def test_a_repeated_take_gets_the_first_result(run: Limpet) -> None:
    run("put", "invitation", '{"for": "ada"}')

    for _ in range(2):
        assert run.json("take", "invitation", "--request-id", "once") == {"key": "invitation", "value": {"for": "ada"}}


@pytest.mark.parametrize("words", [("touch", "k", "1h"), ("persist", "k"), ("take", "k")])
def test_each_can_expect_a_version_and_needs_the_key(run: Limpet, words: tuple[str, ...]) -> None:
    run("put", "other", "1")
    assert run(*words).exit_code == 3
    run("put", "k", "1")

    assert run(*words, "--if-version", "2").exit_code == 4
    assert run(*words, "--if-version", "1").exit_code == 0
