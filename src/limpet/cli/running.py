"""Running a command for as long as a lock is held.

The command is ended when the lock is lost: somebody else may be at work. Signals that ask limpet to
stop go on to the command, and limpet ends when the command has, so that the lock is held as long as
anything runs under it.

At a terminal the command stays in our process group. The terminal then sends Ctrl-C to both of us,
and sending it on would make it two. Elsewhere the command leads a group of its own, so that a signal
reaches what a shell script has started as well.
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

LOOK_S: Final = 0.1
GRACE_S: Final = 10.0
NOT_FOUND: Final = 127
NOT_RUN: Final = 126

_PASSED_ON: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)
_OF_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)


class Courier:
    """Takes the signals that are meant for the command. Before there is one, a signal ends the wait for the lock."""

    def __init__(self) -> None:
        self._starting = False
        self._early: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._leads = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in _PASSED_ON:
            # What is ignored stays ignored, as under nohup; the command inherits that.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the command."""
        # A signal that comes while it starts must not tear us away from a child that nobody waits for.
        self._starting = True
        self._leads = not _at_terminal()
        self._child = subprocess.Popen(command, env=environment, process_group=0 if self._leads else None)
        for number in self._early:
            self.send(number)
        return self._child

    def send(self, number: int) -> None:
        """Send the command a signal, and where it leads a group, all that it started."""
        if self._child is None or self._child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number) if self._leads else self._child.send_signal(number)

    def _take(self, number: int, _: FrameType | None) -> None:
        if not self._starting:
            raise SystemExit(128 + number)
        if self._child is None:
            self._early.append(number)
        elif self._leads or number not in _OF_TERMINAL:
            self.send(number)


def run_while_held(courier: Courier, command: Sequence[str], environment: Mapping[str, str], held: Lock) -> int:
    """Run a command to its end, or end it when the lock is lost. Returns its exit code as a shell counts it."""
    child = courier.start(command, environment)
    done = threading.Event()
    watchman = threading.Thread(target=_end_when_lost, args=(courier, held, done), daemon=True)
    watchman.start()
    try:
        code = _ended(child)
    finally:
        done.set()
        watchman.join()
    return code if code >= 0 else 128 - code


def _ended(child: subprocess.Popen[bytes]) -> int:
    """Wait for a command's end, now and then awake.

    The system may hand a signal to another thread. Then nothing interrupts this one, which alone can pass it on.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_S)


def _end_when_lost(courier: Courier, held: Lock, done: threading.Event) -> None:
    while not done.wait(LOOK_S):
        try:
            held.check()
        except LimpetError:
            courier.send(signal.SIGTERM)
            # Stopped, it would not hear of it.
            courier.send(signal.SIGCONT)
            if not done.wait(GRACE_S):
                courier.send(signal.SIGKILL)
            return


def _at_terminal() -> bool:
    """Whether this process is one of those that the terminal sends Ctrl-C to."""
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
