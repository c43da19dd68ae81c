"""The progress of commands that take long: a bar at a terminal, a line now and then where the output goes to a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from limpet.cli import output

if TYPE_CHECKING:
    from limpet.moving.loader import Report

__all__ = ["Progress", "progress_of"]

AFTER: Final = "LIMPET_PROGRESS_AFTER"
"""The variable that says after how many seconds progress is shown; what is done sooner shows nothing."""

EVERY_S: Final = 10.0


class Progress(Protocol):
    """Shows how far something is."""

    def show(self, done: int) -> None:
        """Show how many entries are done."""

    def report(self, report: Report) -> None:
        """Show how many entries were read."""


@contextmanager
def progress_of(word: str, total: int | None = None) -> Iterator[Progress]:
    """Show the progress of something on standard error, while it lasts."""
    shown: _Lines = _Lines(word, total)
    if sys.stderr is not None and sys.stderr.isatty():
        shown = _Bar(word, total)
    try:
        yield shown
    finally:
        shown.close()


class _Lines:
    """A line every few seconds, for logs."""

    def __init__(self, word: str, total: int | None) -> None:
        self._word, self._total = word, total
        self._next_at = time.monotonic() + EVERY_S

    def report(self, report: Report) -> None:
        self.show(report.read)

    def show(self, done: int) -> None:
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + EVERY_S
            of = f" of about {self._total:,}" if self._total else ""
            output.show_stderr(f"limpet: {self._word}: {done:,}{of} entries")

    def close(self) -> None:
        """End it. The result of the command follows."""


class _Bar(_Lines):
    """A bar at a terminal. Without rich, which draws it, the lines."""

    def __init__(self, word: str, total: int | None) -> None:
        super().__init__(word, total)
        self._from = time.monotonic() + float(os.environ.get(AFTER) or 1.0)
        self._bar: Any = None

    def show(self, done: int) -> None:
        if self._bar is None:
            if time.monotonic() < self._from:
                return
            self._bar = _make_bar(self._word, self._total)
        if self._bar is False:
            super().show(done)
        else:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def _make_bar(word: str, total: int | None) -> Any:
    """A bar that is drawn from now on; False without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
    except ModuleNotFoundError:
        return False
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(word, total=total)
    bar.start()
    return bar
