"""Pipes, full disks, closed streams and terminals."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

import limpet
from limpet.clock import format_duration
from tests.cli.support import Limpet, command, looked_at, start, terminal, wait_for_end


@pytest.fixture
def many(url: str) -> str:
    """A store whose list of keys is more than a pipe holds."""
    with limpet.sync.open(url) as store:
        for hundred in range(40):
            batch = store.batch()
            for number in range(100):
                batch.put(f"key/{hundred:02}/{number:02}/{'x' * 40}", 1)
            batch.commit()
    return url


@pytest.mark.parametrize(
    "words", [["ls"], ["ls", "--long"], ["--json", "ls"], ["watch", "--initial"], ["--json", "watch", "--initial"]]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_the_command_without_a_word(
    many: str, monkeypatch: pytest.MonkeyPatch, words: list[str], unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    process = start("--url", many, *words)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None

    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 141


def test_a_shell_hears_nothing_of_it(many: str) -> None:
    shell = ["sh", "-c", '"$@" | head -1', "sh", *command("--url", many, "ls")]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("key/00/00/")


@pytest.fixture
def damaged(url: str, file: Path) -> str:
    """A store in which the second value cannot be read."""
    with limpet.sync.open(url) as store:
        for key in ("a", "b", "c"):
            store.put(key, 1)
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("UPDATE limpet_entries SET value = '{' WHERE key = 'b'")
    return url


def test_what_was_answered_before_an_error_is_printed(damaged: str) -> None:
    code, stdout, stderr = wait_for_end(start("--url", damaged, "ls", "--values"))

    assert (code, stdout) == (6, "a\t1\n")
    assert stderr == "limpet: a stored value is not JSON\n  Run 'limpet doctor' for details.\n"


def test_an_error_is_printed_though_no_process_reads_the_output(damaged: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("--url", damaged, "ls", "--values", stdout=writing)
    os.close(writing)

    code, _, stderr = wait_for_end(process)

    assert code == 6
    assert stderr == "limpet: a stored value is not JSON\n  Run 'limpet doctor' for details.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_is_reported(url: str, run: Limpet) -> None:
    run("put", "k", "1")
    with Path("/dev/full").open("w") as full:
        code, _, stderr = wait_for_end(start("--url", url, "get", "k", stdout=full))
        silent, *_ = wait_for_end(start("--url", url, "get", "nothing", stdout=full, stderr=full))

    assert (code, stderr) == (1, "limpet: cannot write to standard output: No space left on device\n")
    assert silent == 3


def test_closed_streams_change_no_exit_code(url: str, run: Limpet) -> None:
    run("put", "k", "1")

    for words, code in ((["get", "k"], 0), (["ls"], 0), (["get", "nothing"], 3), (["stat"], 0)):
        done = subprocess.run(
            ["sh", "-c", '"$@" >&- 2>&- <&-', "sh", *command("--url", url, *words)], capture_output=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_output_is_utf_8_whatever_the_locale_says(url: str, run: Limpet) -> None:
    run("put", "grüße/🐚", '"schön"')
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}

    def output_of(*words: str) -> tuple[bytes, bytes]:
        done = subprocess.run(command("--url", url, *words), env=environment, capture_output=True, check=False)
        return done.stdout, done.stderr

    assert output_of("ls", "--values")[0].decode() == 'grüße/🐚\t"schön"\n'
    assert output_of("history", "grüße/🐚")[0].decode().split("\t")[5:] == ["grüße/🐚", '"schön"\n']
    assert "'grüße'" in output_of("get", "grüße")[1].decode()


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0.0s"), (9.96, "10.0s"), (59.9, "59.9s"), (60, "1m"), (61.4, "1m1s"), (5400, "1h30m"), (90_061, "1d1h1m1s")],
)
def test_a_duration_is_shown_as_it_is_written(seconds: float, written: str) -> None:
    assert format_duration(seconds) == written


# At a terminal ----------------------------------------------------------------


def test_a_terminal_shows_what_a_write_left(url: str, file: Path) -> None:
    assert looked_at("--url", url, "put", "k", "1") == (0, f"limpet: making {file}\nversion 1 at revision 1\n")
    assert looked_at("--url", url, "put", "k", "2") == (0, "version 2 at revision 2\n")
    assert looked_at("--url", url, "field", "set", "r", "a=1") == (0, "version 1 at revision 3\n")


def test_a_terminal_shows_that_there_is_nothing(url: str, run: Limpet) -> None:
    run("put", "k", "1")

    assert looked_at("--url", url, "ls", "none/") == (
        0,
        f"limpet: nothing to list in namespace 'default' of {url}\n",
    )
    assert looked_at("--url", url, "ls") == (0, "k\n")


def test_a_terminal_is_sent_no_bytes_and_no_orders(url: str) -> None:
    with limpet.sync.open(url) as store:
        store.put("bytes", b"\xff\x1b")
        store.put("text", "c1 \u009b")

    assert looked_at("--url", url, "get", "bytes") == (0, '{"$bytes":"/xs="}\n')
    assert looked_at("--url", url, "get", "text") == (0, '"c1 \\u009b"\n')
    assert looked_at("--url", url, "ls", "--values") == (0, 'bytes\t{"$bytes":"/xs="}\ntext\t"c1 \\u009b"\n')


def test_a_terminal_gets_headings_and_columns_in_line(url: str, run: Limpet) -> None:
    run("put", "k", "1")
    run("put", "long", '"abc"', "--ttl", "7d")

    _, listed = looked_at("--url", url, "ls", "--long")
    _, changed = looked_at("--url", url, "history", "k")

    heading, first, second = listed.splitlines()
    assert heading.split() == ["VERSION", "REVISION", "BYTES", "EXPIRES", "WRITER", "KEY"]
    assert heading.index("KEY") == first.index("k") == second.index("long")
    heading, first = changed.splitlines()
    assert heading.split() == ["REVISION", "TIME", "OP", "VERSION", "WRITER", "KEY", "VALUE"]
    assert [first[heading.index(word) :].split()[0] for word in ("REVISION", "OP", "VERSION", "KEY", "VALUE")] == [
        *("1", "put", "1", "k", "1")
    ]
    assert "\t" not in listed + changed


def test_ctrl_c_ends_a_watch_at_a_terminal(url: str, run: Limpet) -> None:
    run("put", "k", "1")
    with terminal("--url", url, "watch", "--initial") as screen:
        screen.wait_for("synced")

        screen.press(b"\x03")

        assert screen.end() == 130
        assert "Traceback" not in screen.seen
        assert screen.seen.startswith("REVISION")


def test_there_is_no_colour(url: str, run: Limpet) -> None:
    run("put", "k", "1")

    for words in (["ls", "-l"], ["stat"], ["doctor"], ["get", "nothing"], ["--help"]):
        assert "\x1b" not in looked_at("--url", url, *words)[1]
