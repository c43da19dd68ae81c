"""``limpet lock NAME -- COMMAND``, with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import limpet
from limpet.cli import running
from limpet.cli.running import SignalForwarder, run_while_held
from tests.cli.support import WAIT_S, Limpet, read_line, start, terminal, wait_for_end

PYTHON = [sys.executable, "-c"]

# Prints that it runs, waits for a signal, and exits with the number of that signal.
LISTENS = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: sys.exit(40 + number))
print("on", flush=True)
# A signal that comes just before a sleep begins arrives only when that ends.
for _ in range(600):
    time.sleep(0.1)
"""


def lock(url: str, *words: str, **options: object) -> subprocess.Popen[str]:
    return start("--url", url, "lock", "nightly", *words, **options)


def locks(url: str) -> list[str]:
    with limpet.sync.open(url) as store:
        return [held.name for held in store.locks()]


# The command ------------------------------------------------------------------


def test_the_command_runs_while_the_lock_is_held_and_its_exit_code_is_passed_on(url: str) -> None:
    script = (
        "import limpet, os, sys\n"
        "with limpet.sync.open() as store:\n"
        "    (held,) = store.locks()\n"
        "    print(held.name == os.environ['LIMPET_LOCK'], held.token == int(os.environ['LIMPET_FENCING_TOKEN']))\n"
        "    print(held.holder, 0 < held.remaining <= 4)\n"
        "sys.exit(9)\n"
    )

    code, stdout, stderr = wait_for_end(lock(url, "--ttl", "4s", "--holder", "me", "--", *PYTHON, script))

    assert (code, stdout, stderr) == (9, "True True\nme True\n", "")
    assert locks(url) == []


def test_the_holder_is_the_host_and_process_unless_named(url: str) -> None:
    process = lock(url, "--", *PYTHON, "import limpet; print(limpet.sync.open().locks()[0].holder)")
    code, stdout, _ = wait_for_end(process)

    assert code == 0
    assert stdout.endswith(f":{process.pid}\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGTERM, 143), (signal.SIGSEGV, 139)])
def test_a_command_that_dies_by_a_signal_is_reported_as_by_a_shell(url: str, number: int, code: int) -> None:
    died = lock(url, "--", *PYTHON, f"import os; os.kill(os.getpid(), {number})")

    assert wait_for_end(died)[0] == code
    assert locks(url) == []


def test_options_behind_the_two_dashes_are_the_commands(url: str) -> None:
    code, stdout, _ = wait_for_end(lock(url, "--", "echo", "--ttl", "-n", "--help", "--"))

    assert (code, stdout) == (0, "--ttl -n --help --\n")


def test_a_command_that_is_not_there_exits_with_127(url: str) -> None:
    code, _, stderr = wait_for_end(lock(url, "--", "no-such-program-here"))

    assert (code, stderr) == (127, "limpet: cannot run 'no-such-program-here': No such file or directory\n")
    assert locks(url) == []


def test_a_command_that_cannot_be_run_exits_with_126(url: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a program")

    code, _, stderr = wait_for_end(lock(url, "--", "./notes.txt"))

    assert (code, stderr) == (126, "limpet: cannot run './notes.txt': Permission denied\n")
    assert locks(url) == []


def test_the_command_finds_the_store_from_any_folder(tmp_path: Path) -> None:
    """A relative URL means another file in another folder."""
    (tmp_path / "else where?").mkdir()
    script = "cd 'else where?' && echo $LIMPET_NAMESPACE && exec \"$0\" -m limpet get k"
    relative = "sqlite:///state.db?synchronous=normal"
    Limpet(relative)("-n", "jobs", "put", "k", "1")

    running = start("--url", relative, "-n", "jobs", "lock", "n", "--", "sh", "-c", script, sys.executable)

    assert wait_for_end(running) == (0, "jobs\n1\n", "")


def test_a_folder_with_a_strange_name_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = tmp_path / "50% @home?"
    strange.mkdir()
    monkeypatch.chdir(strange)
    script = 'cd / && exec "$0" -m limpet put k 1 --fenced'

    code, _, stderr = wait_for_end(start("lock", "n", "--", "sh", "-c", script, sys.executable))

    assert (code, stderr) == (0, "")
    assert Limpet()("get", "k").stdout == "1\n"


# Who may have it --------------------------------------------------------------


def test_a_lock_that_is_held_exits_with_5_and_runs_nothing(url: str, run: Limpet) -> None:
    with limpet.sync.open(url) as store, store.lock("nightly", ttl=30, holder="alice") as held:
        code, stdout, stderr = wait_for_end(lock(url, "--", "echo", "ran"))
        refused = run("--json", "lock", "nightly", "--", "echo", "ran")
        token = held.token

    assert (code, stdout) == (5, "")
    first, second = stderr.splitlines()
    assert first.startswith("limpet: lock 'nightly' is held by alice for another ")
    assert first.endswith(f" s (token {token})")
    assert second == "  COMMAND was not run. Try again later, or wait for the lock with --wait."
    document = json.loads(refused.stderr)
    assert (refused.exit_code, document["error"], document["exit_code"]) == (5, "lock_held", 5)
    details = document["details"]
    assert (details["name"], details["holder"], details["token"]) == ("nightly", "alice", token)
    assert 0 < details["remaining"] <= 30


def test_a_wait_ends_with_the_release(url: str) -> None:
    with limpet.sync.open(url) as store:
        held = store.lock("nightly", ttl=30).acquire()
        waiting = lock(url, "--wait", "50s", "--", "echo", "ran")
        time.sleep(0.5)
        assert waiting.poll() is None
        held.release()
        code, stdout, _ = wait_for_end(waiting)

    assert (code, stdout) == (0, "ran\n")


def test_a_wait_that_is_over_exits_with_5(url: str) -> None:
    with limpet.sync.open(url) as store, store.lock("nightly", ttl=30):
        began = time.monotonic()
        code, stdout, _ = wait_for_end(lock(url, "--wait", "600ms", "--", "echo", "ran"))

    assert (code, stdout) == (5, "")
    assert time.monotonic() - began >= 0.6


def test_locks_of_other_names_and_namespaces_are_free(url: str) -> None:
    with (
        limpet.sync.open(url) as store,
        store.lock("other", ttl=30),
        store.namespace("jobs").lock("nightly", ttl=30),
    ):
        assert wait_for_end(lock(url, "--", "true"))[0] == 0


# Losing it --------------------------------------------------------------------


def test_a_command_that_loses_its_lock_is_ended(url: str) -> None:
    """Stopped past its time like a laptop that slept, the wrapper finds the lock gone and ends the command."""
    running = lock(url, "--ttl", "1s", "--", *PYTHON, LISTENS)
    assert read_line(running) == "on\n"
    os.kill(running.pid, signal.SIGSTOP)
    with limpet.sync.open(url) as store:
        thief = store.lock("nightly", ttl=30, wait=20).acquire()
        os.kill(running.pid, signal.SIGCONT)
        code, _, stderr = wait_for_end(running)

        assert code == 5
        assert "limpet: lock 'nightly' was lost; token 1 is stale\n  Stop: " in stderr
        thief.release()


def test_what_a_script_has_started_is_ended_with_it(url: str, tmp_path: Path) -> None:
    grandchild = f"{LISTENS}\n".replace("sys.exit(40 + number)", "open('ended', 'w').write(str(number)) and sys.exit()")
    running = lock(url, "--ttl", "1s", "--", "sh", "-c", '"$0" -c "$1"; true', sys.executable, grandchild)
    assert read_line(running) == "on\n"
    os.kill(running.pid, signal.SIGSTOP)
    with limpet.sync.open(url) as store:
        store.lock("nightly", ttl=30, wait=20).acquire().release()
    os.kill(running.pid, signal.SIGCONT)

    assert wait_for_end(running)[0] == 5
    wait_until((tmp_path / "ended").exists)
    wait_until(lambda: (tmp_path / "ended").read_text() == str(int(signal.SIGTERM)))


def test_a_command_that_does_not_listen_is_killed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken by hand, a lock is not renewed; so this one is lost as soon as its time is over."""
    monkeypatch.setattr(running, "GRACE_S", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('deaf', 'w'); time.sleep(60)"
    clock = limpet.ManualClock()

    def turn() -> None:
        wait_until((tmp_path / "deaf").exists)
        clock.advance(60)

    with limpet.sync.open(url, clock=clock) as store, SignalForwarder() as signals:
        held = store.lock("nightly", ttl=30).acquire()
        turning = threading.Thread(target=turn)
        turning.start()

        code = run_while_held(signals, [*PYTHON, deaf], dict(os.environ), held)

        turning.join()
        assert code == 128 + signal.SIGKILL
        assert held.lost


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Fences -----------------------------------------------------------------------

WRITES = [
    ["put", "k", "2"],
    ["del", "k"],
    ["incr", "k"],
    ["field", "set", "r", "a=2"],
    ["field", "swap", "r", "a", "1", "2"],
]


@pytest.mark.parametrize("words", WRITES, ids=[" ".join(words[:2]) for words in WRITES])
def test_a_fenced_write_happens_only_while_the_lock_is_held(
    run: Limpet, url: str, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    run("put", "k", "1")
    run("field", "set", "r", "a=1")
    before = run("ls", "--long").stdout
    with limpet.sync.open(url) as store:
        held = store.lock("nightly", ttl=30).acquire()
        monkeypatch.setenv("LIMPET_LOCK", "nightly")
        monkeypatch.setenv("LIMPET_FENCING_TOKEN", str((held.token or 0) + 1))

        late = run(*words, "--fenced")

        assert late.exit_code == 5
        assert late.stderr.startswith(f"limpet: lock 'nightly' was lost; token {(held.token or 0) + 1} is stale\n")
        assert run("ls", "--long").stdout == before
        monkeypatch.setenv("LIMPET_FENCING_TOKEN", str(held.token))
        assert run(*words, "--fenced").exit_code == 0
        assert run("ls", "--long").stdout != before
        held.release()


@pytest.mark.parametrize("words", WRITES, ids=[" ".join(words[:2]) for words in WRITES])
@pytest.mark.parametrize("variables", [{}, {"LIMPET_LOCK": "n"}, {"LIMPET_LOCK": "n", "LIMPET_FENCING_TOKEN": "x"}])
def test_a_fence_needs_a_lock_around_it(
    run: Limpet, monkeypatch: pytest.MonkeyPatch, words: list[str], variables: dict[str, str]
) -> None:
    run("put", "k", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    result = run(*words, "--fenced")

    assert result.exit_code == 2
    assert "LIMPET_LOCK and LIMPET_FENCING_TOKEN are not set" in result.stderr


def test_the_fence_is_there_in_the_command(url: str, run: Limpet) -> None:
    code, _, stderr = wait_for_end(lock(url, "--", sys.executable, "-m", "limpet", "put", "report", "1", "--fenced"))

    assert (code, stderr) == (0, "")
    assert run("get", "report").stdout == "1\n"


# Signals ----------------------------------------------------------------------

PASSED_ON = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"]


@pytest.mark.parametrize("name", PASSED_ON)
def test_a_signal_is_passed_on_to_the_command(url: str, name: str) -> None:
    number = signal.Signals[name]
    running = lock(url, "--", *PYTHON, LISTENS)
    assert read_line(running) == "on\n"

    running.send_signal(number)

    assert wait_for_end(running) == (40 + number, "", "")
    assert locks(url) == []


def test_the_lock_is_held_until_the_command_has_ended(url: str) -> None:
    """A command that takes its time after SIGTERM still has the lock."""
    script = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'caught\\n'))\n"
        "print('on', flush=True)\n"
        "input()\n"
    )
    running = lock(url, "--", *PYTHON, script, stdin=subprocess.PIPE)
    assert read_line(running) == "on\n"
    running.send_signal(signal.SIGTERM)
    assert read_line(running) == "caught\n"

    assert locks(url) == ["nightly"]
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()
    assert wait_for_end(running)[0] == 0


def test_a_signal_reaches_what_a_script_has_started(url: str) -> None:
    running = lock(url, "--", "sh", "-c", '"$0" -c "$1"; echo $?', sys.executable, LISTENS)
    assert read_line(running) == "on\n"

    running.send_signal(signal.SIGINT)

    assert wait_for_end(running)[1] in ("", f"{40 + signal.SIGINT}\n")
    assert locks(url) == []


def test_what_is_ignored_stays_ignored(url: str) -> None:
    """Under nohup no command ends with the terminal."""
    shell = 'trap \'\' HUP; exec "$0" -m limpet --url "$1" lock nightly -- "$0" -c "$2"'
    script = "import signal; print('on', signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True); input()"
    running = subprocess.Popen(
        ["sh", "-c", shell, sys.executable, url, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert read_line(running) == "on True\n"
    running.send_signal(signal.SIGHUP)

    code, _, stderr = finished_with(running, "\n")

    assert (code, stderr) == (0, "")


def finished_with(process: subprocess.Popen[str], words: str) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(words, timeout=WAIT_S)
    return process.returncode, stdout, stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_wait_for_the_lock(url: str, name: str) -> None:
    number = signal.Signals[name]
    with limpet.sync.open(url) as store, store.lock("nightly", ttl=30):
        waiting = lock(url, "--wait", "50s", "--", "echo", "ran")
        # It has requested the lock once it has the file open.
        wait_until(lambda: has_open(waiting.pid, "state.db-wal"))
        time.sleep(0.3)
        waiting.send_signal(number)

        assert wait_for_end(waiting) == (128 + number, "", "")


def has_open(pid: int, name: str) -> bool:
    """Whether a process has a file open; where that cannot be read, it is given time."""
    folder = Path(f"/proc/{pid}/fd")
    if not folder.exists():
        time.sleep(1.0)
        return True
    return any(os.readlink(link).endswith(name) for link in folder.iterdir() if link.is_symlink())


def test_a_signal_that_comes_while_the_command_starts_reaches_it() -> None:
    with SignalForwarder() as signals:
        signals._starting = True
        signal.raise_signal(signal.SIGTERM)

        child = signals.start(["sleep", "60"], dict(os.environ))

        assert child.wait(WAIT_S) == -signal.SIGTERM


def test_a_signal_that_comes_after_the_command_is_nobodys() -> None:
    with SignalForwarder() as signals:
        signals.start(["true"], dict(os.environ)).wait(WAIT_S)

        signal.raise_signal(signal.SIGTERM)


def test_the_handlers_of_before_come_back() -> None:
    before = {name: signal.getsignal(signal.Signals[name]) for name in PASSED_ON}

    with SignalForwarder():
        assert signal.getsignal(signal.SIGTERM) != before["SIGTERM"]

    assert {name: signal.getsignal(signal.Signals[name]) for name in PASSED_ON} == before


# At a terminal ----------------------------------------------------------------

COUNTS = """
import signal, sys, time
caught = []
signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
print("on", flush=True)
while not caught:
    time.sleep(0.01)
time.sleep(0.5)
sys.exit(40 + len(caught))
"""


def test_ctrl_c_at_a_terminal_reaches_the_command_once(url: str) -> None:
    with terminal("--url", url, "lock", "nightly", "--", *PYTHON, COUNTS) as screen:
        screen.wait_for("on\n")

        screen.press(b"\x03")

        assert screen.end() == 41
    assert locks(url) == []


def test_a_command_at_a_terminal_can_ask_and_be_answered(url: str) -> None:
    """In a group of its own it would be stopped for reading."""
    with terminal("--url", url, "lock", "nightly", "--", *PYTHON, "print(input('name? ')[::-1])") as screen:
        screen.wait_for("name? ")

        screen.press(b"limpet\n")

        assert screen.end() == 0
        assert "tepmil" in screen.seen


def test_a_signal_sent_to_limpet_at_a_terminal_is_passed_on(url: str) -> None:
    with terminal("--url", url, "lock", "nightly", "--", *PYTHON, LISTENS) as screen:
        screen.wait_for("on\n")

        os.kill(screen.pid, signal.SIGTERM)

        assert screen.end() == 40 + signal.SIGTERM
