"""``limpet`` in this process, in processes of its own, and at a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from click.testing import CliRunner, Result

from limpet.cli import main

WAIT_S = 120.0

# The leader of a new session makes its standard input the terminal of the session.
AT_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Limpet:
    """Runs commands in this process."""

    def __init__(self, url: str | None = None) -> None:
        self._options = [] if url is None else ["--url", url]

    def __call__(self, *words: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, [*self._options, *words], input=stdin, prog_name="limpet")

    def json(self, *words: str) -> Any:
        """The one document that a command prints."""
        (document,) = self.documents(*words)
        return document

    def documents(self, *words: str) -> list[Any]:
        """The documents that a command prints, one a line."""
        result = self("--json", *words)
        assert result.exit_code == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "limpet", *words]


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    """``limpet`` as a process without a terminal."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*words), text=True, start_new_session=True, **{**pipes, **options})


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a process, once it has ended."""
    try:
        stdout, stderr = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, stdout, stderr


class Terminal:
    """``limpet`` at a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], keyboard: int) -> None:
        self._process = process
        self._keyboard = keyboard
        self.pid = process.pid
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Read until the text is there."""
        while text not in self.seen:
            assert self._read(), f"it ended, and all that was to be seen is {self.seen!r}"

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def end(self) -> int:
        """The exit code, once it has ended."""
        while self._read():
            pass
        return self._process.wait(WAIT_S)

    def _read(self) -> bool:
        try:
            read = os.read(self._keyboard, 65_536)
        except OSError:  # Linux raises it when the other side of a terminal has closed.
            return False
        self.seen += read.decode(errors="backslashreplace").replace("\r\n", "\n")
        return bool(read)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    """``limpet`` at a terminal of its own."""
    keyboard, screen = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, *command(*words)],
        stdin=screen,
        stdout=screen,
        stderr=screen,
        start_new_session=True,
    )
    os.close(screen)
    try:
        yield Terminal(process, keyboard)
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)


def looked_at(*words: str) -> tuple[int, str]:
    """Exit code and screen of a command at a terminal."""
    with terminal(*words) as screen:
        code = screen.end()
        return code, screen.seen
