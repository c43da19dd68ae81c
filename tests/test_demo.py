"""The demonstration shows what it claims, and ends on a signal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DEMO = [sys.executable, "-m", "limpet.demo.acts"]
PATIENCE_S = 120.0

# What is printed, act by act. Numbers that differ from run to run are left open.
CLAIMS = [
    r"ada: put step 2, now version 2 at revision \d+",
    r"ada: reads that ben is at step \d",
    r"get and put: six steps, and the count is 3; 3 updates are lost",
    r"update: six steps, and the count is 6$",
    r"ada is refused: conflict on 'theme': expected revision \d+, found version 2 at revision \d+",
    r"ben's write stands: the theme is 'dark'",
    r"one winner, written down with the claim: (ada|ben|cem)",
    r"0.5 s later, reading it gives None",
    r"┊ +\d+ expire session/ada$",
    r"ada \(process \d+\) holds the lock with token \d+, and freezes",
    r"ben tries: lock 'report' is held by ada for another \d\.\d s \(token \d+\)",
    r"ada is refused: lock 'report' was lost; token \d+ is stale, stop writing",
    r"the report is still 'by ben'",
    r"the batch is refused as a whole: conflict on 'account/ada'",
    r"ada has 10, ben has 0, the revision is still \d+",
    r"second attempt of request 'order-17/mail': the counter is 1$",
    r"counted once, at revision \d+: 1 mail sent",
    r"\d+ keys and \d+ changes are in state.db",
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the demonstration makes its temporary folder. It must be empty again in the end."""
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def running(folder: Path, *options: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """The demonstration, started. It is killed after the test."""
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONIOENCODING": "utf-8", **more}
    with subprocess.Popen(
        [*DEMO, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def read_until(demo: subprocess.Popen[str], word: str) -> str:
    """The first line that holds the word."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if word in line:
            return line
    raise AssertionError(f"the demonstration ended without printing {word!r}")


@pytest.fixture(scope="module")
def one_round(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of one round."""
    folder = tmp_path_factory.mktemp("demo")
    with running(folder, "--once", "--fast") as demo:
        shown, complaints = demo.communicate(timeout=PATIENCE_S)
    assert (demo.returncode, complaints) == (0, "")
    assert list(folder.iterdir()) == []
    return shown


@pytest.mark.parametrize("claim", CLAIMS)
def test_one_round_shows_every_promise(one_round: str, claim: str) -> None:
    assert re.search(claim, one_round, re.MULTILINE), one_round


def test_the_watch_shows_every_change_in_order(one_round: str) -> None:
    revisions = [int(number) for number in re.findall(r"┊ +(\d+) ", one_round)]

    assert len(revisions) > 20
    assert revisions == sorted(set(revisions))
    # The late write of the frozen process is in no change.
    assert "too late" not in "".join(line for line in one_round.splitlines() if "┊" in line)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("moment", ["put step 1", "and freezes"])
def test_it_ends_on_a_signal(folder: Path, sign: signal.Signals, moment: str) -> None:
    with running(folder, "--fast") as demo:
        line = read_until(demo, moment)
        demo.send_signal(sign)
        shown, complaints = demo.communicate(timeout=PATIENCE_S)

    assert demo.returncode == 128 + sign
    assert complaints == ""
    assert "The show is over." in shown
    if frozen := re.search(r"process (\d+)", line):
        with pytest.raises(ProcessLookupError):
            os.kill(int(frozen[1]), 0)


def test_a_reader_who_leaves_ends_it_without_noise(folder: Path) -> None:
    """``python -m limpet.demo.acts | head -1``"""
    with running(folder, "--fast") as demo:
        read_until(demo, "Three workers")
        assert demo.stdout is not None
        assert demo.stderr is not None
        demo.stdout.close()
        complaints = demo.stderr.read()
        demo.wait(PATIENCE_S)

    assert complaints == ""


def test_on_a_terminal_it_goes_on_in_colours_until_ctrl_c(folder: Path) -> None:
    # The second round begins, so it does not end by itself.
    shown = shown_on_terminal(folder, "The next one follows", "Three workers")

    assert "\x1b[1;36m1. Three workers" in shown


def test_no_color_is_respected(folder: Path) -> None:
    assert "\x1b[" not in shown_on_terminal(folder, "Three workers", NO_COLOR="1")


def shown_on_terminal(folder: Path, *moments: str, **more: str) -> str:
    """What a terminal shows until these moments have come. Ctrl-C then ends it."""
    environment = {**os.environ, "TMPDIR": str(folder), "TERM": "xterm", "NO_COLOR": "", "COLUMNS": "160", **more}
    ours, theirs = pty.openpty()
    with subprocess.Popen([*DEMO, "--fast"], env=environment, stdout=theirs, stderr=theirs) as demo:
        try:
            os.close(theirs)
            shown = "".join(_read_terminal(ours, until=moment) for moment in moments)
            demo.send_signal(signal.SIGINT)
            demo.wait(PATIENCE_S)
        finally:
            demo.kill()
            os.close(ours)
    assert demo.returncode == 130
    assert "Traceback" not in shown
    return shown


def _read_terminal(terminal: int, *, until: str) -> str:
    shown = b""
    deadline = time.monotonic() + PATIENCE_S
    while until.encode() not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"waited in vain for {until!r} after {shown.decode()!r}"
        shown += os.read(terminal, 65_536)
    return shown.decode()


def test_help_names_the_options() -> None:
    shown = subprocess.run([*DEMO, "--help"], capture_output=True, text=True, check=True).stdout

    assert "--once" in shown
    assert "--fast" in shown
    assert "frozen" not in shown
