"""Other processes to talk to, in lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Final, Self

ROOT: Final = Path(__file__).parents[1]
PATIENCE_S: Final = 120.0


def unmeasured() -> dict[str, str]:
    """The environment of a process whose coverage is not measured: most run what the tests run in their own process.

    Measuring takes a short process as long again. A fork of one that is measured could wait for ever: it copies the
    lock of coverage's data as it is, also where another thread holds it.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}


def bare_pytest() -> list[str]:
    """The words that start pytest with the plugins that a test of the suite needs.

    By itself it would load every plugin of the environment, which takes longer than many a run of a few tests.
    """
    needed = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
    return [sys.executable, "-m", "pytest", "--disable-plugin-autoload", *(f"-p{name}" for name in needed)]


class Process:
    """A function of a module in a process of its own."""

    module: ClassVar[str]

    def __init__(self, name: str, *args: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, name, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=unmeasured(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, word: object) -> None:
        self._in.write(json.dumps(word) + "\n")
        self._in.flush()

    def receive(self) -> Any:
        line = self._out.readline()
        assert line, f"the process ended with status {self._process.wait(PATIENCE_S)}"
        return json.loads(line)

    async def receive_async(self) -> Any:
        """What it says next, while this loop goes on."""
        return await asyncio.to_thread(self.receive)

    def kill(self) -> None:
        """SIGKILL: it gets no chance to clean up."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def end(self) -> None:
        """Wait for its normal end."""
        assert self._process.wait(PATIENCE_S) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._process.returncode is None:
                self._in.close()
                self.end()
        finally:
            if self._process.poll() is None:
                self.kill()
            self._in.close()
            self._out.close()
