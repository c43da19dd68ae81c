"""``limpet watch`` and ``limpet history``: lines as they come."""

from __future__ import annotations

import re
import signal

import pytest

import limpet
from tests.cli.support import Limpet, read_line, start, wait_for_end

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def cells(line: str) -> list[str]:
    return line.removesuffix("\n").split("\t")


def test_history_shows_the_changes_of_a_key(run: Limpet, url: str) -> None:
    run("put", "k", '{"a": 1}')
    run("put", "other", "1")
    with limpet.sync.open(url, writer="agent-7") as store:
        store.touch("k", 60)
    run("del", "k")
    run("--writer", "alice", "field", "set", "k", "a=2")

    lines = [cells(line) for line in run("history", "k").stdout.splitlines()]

    assert [[line[0], *line[2:]] for line in lines] == [
        ["1", "put", "1", "-", "k", '{"a":1}'],
        ["3", "touch", "1", "agent-7", "k", ""],
        ["4", "delete", "1", "-", "k", ""],
        ["5", "patch", "1", "alice", "k", '{"a":2}'],
    ]
    assert all(re.fullmatch(TIME, line[1]) for line in lines)


def test_watch_shows_what_there_is_and_resumes(run: Limpet) -> None:
    for key in ("config/a", "config/b", "other"):
        run("put", key, "1")

    lines = [cells(line) for line in run("watch", "config/*", "--initial", "--count", "3").stdout.splitlines()]

    assert [line[2:] for line in lines] == [
        ["put", "1", "-", "config/a", "1"],
        ["put", "1", "-", "config/b", "1"],
        ["synced", "-", "-", "", ""],
    ]
    run("put", "config/a", "2")
    after = cells(run("watch", "--after", lines[-1][0], "--count", "1").stdout)
    assert after[2:] == ["put", "2", "-", "config/a", "2"]


def test_watch_takes_one_key(run: Limpet) -> None:
    run("put", "config", "1")
    run("put", "config/a", "1")

    line = cells(run("watch", "config/a", "--after", "0", "--count", "1").stdout)
    assert line[2:] == ["put", "1", "-", "config/a", "1"]


def test_a_change_of_another_process_is_shown_at_once(url: str) -> None:
    with limpet.sync.open(url) as store:
        store.put("k", 1)
        watching = start("--url", url, "watch", "--initial")
        assert cells(read_line(watching))[2:] == ["put", "1", "-", "k", "1"]
        assert cells(read_line(watching))[2] == "synced"

        store.put("k", "zwei")

        assert cells(read_line(watching))[2:] == ["put", "2", "-", "k", '"zwei"']
    watching.terminate()
    code, _, stderr = wait_for_end(watching)
    assert (code, stderr) == (-signal.SIGTERM, "")


def test_an_expiry_is_shown_though_no_other_process_has_the_store_open(url: str, run: Limpet) -> None:
    run("put", "k", "1", "--ttl", "300ms")

    watching = start("--url", url, "watch", "--after", "0", "--count", "2")

    _, stdout, _ = wait_for_end(watching)
    first, second = map(cells, stdout.splitlines())
    assert (first[2], second[2]) == ("put", "expire")
    assert re.fullmatch(TIME, second[1])


@pytest.mark.parametrize("words", [["watch", "--initial"], ["--json", "watch", "--initial"]])
def test_an_interrupt_ends_a_watch_quietly(url: str, run: Limpet, words: list[str]) -> None:
    run("put", "k", "1")
    watching = start("--url", url, *words)
    assert read_line(watching)

    watching.send_signal(signal.SIGINT)

    code, _, stderr = wait_for_end(watching)
    assert (code, stderr) == (130, "")
