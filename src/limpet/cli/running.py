"""Running a command for as long as a lock is held.

The command is ended when the lock is lost, because another holder may be at work. Signals that would stop limpet are
forwarded to the command, and limpet ends after the command, so that the lock is held as long as anything runs under it.

At a terminal the command stays in our process group. The terminal then sends Ctrl-C to both, and forwarding it would
send it twice. Elsewhere the command leads its own group, so that a signal also reaches the processes that it started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Final, Self

from limpet.errors import LimpetError
from limpet.sync import Lock

CHECK_S: Final = 0.1
GRACE_S: Final = 10.0
NOT_FOUND: Final = 127
NOT_RUN: Final = 126

_FORWARDED: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)
_OF_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)


class SignalForwarder:
    """Forwards signals to the command. Before the command starts, a signal ends the wait for the lock."""

    def __init__(self) -> None:
        self._starting = False
        self._early: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._leads = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in _FORWARDED:
            # An ignored signal stays ignored, as under nohup; the command inherits that.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the command."""
        # A signal during the start must not end this process, or no process would wait for the child.
        self._starting = True
        self._leads = not _at_terminal()
        self._child = subprocess.Popen(command, env=environment, process_group=0 if self._leads else None)
        for number in self._early:
            self.send(number)
        return self._child

    def send(self, number: int) -> None:
        """Send a signal to the command; where it leads a group, to the whole group."""
        if self._child is None or self._child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number) if self._leads else self._child.send_signal(number)

    def _forward(self, number: int, _: FrameType | None) -> None:
        if not self._starting:
            raise SystemExit(128 + number)
        if self._child is None:
            self._early.append(number)
        elif self._leads or number not in _OF_TERMINAL:
            self.send(number)


def run_while_held(signals: SignalForwarder, command: Sequence[str], environment: Mapping[str, str], held: Lock) -> int:
    """Run a command to its end, or end it when the lock is lost. Returns its exit code as a shell reports it."""
    child = signals.start(command, environment)
    done = threading.Event()
    checker = threading.Thread(target=_end_when_lost, args=(signals, held, done), daemon=True)
    checker.start()
    try:
        code = _wait_for(child)
    finally:
        done.set()
        checker.join()
    return code if code >= 0 else 128 - code


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a command, in short intervals.

    The system may deliver a signal to another thread. That does not interrupt this one, and only this one runs the
    handler.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(CHECK_S)


def _end_when_lost(signals: SignalForwarder, held: Lock, done: threading.Event) -> None:
    while not done.wait(CHECK_S):
        try:
            held.check()
        except LimpetError:
            signals.send(signal.SIGTERM)
            # A stopped process would not receive it.
            signals.send(signal.SIGCONT)
            if not done.wait(GRACE_S):
                signals.send(signal.SIGKILL)
            return


def _at_terminal() -> bool:
    """Whether the terminal sends Ctrl-C to this process."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
