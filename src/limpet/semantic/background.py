"""Work that runs on the event loop for as long as its owner is used with ``async with``."""

from __future__ import annotations

import asyncio
from typing import ClassVar

__all__ = ["BackgroundTask"]


class BackgroundTask:
    """Runs `_run` on the running event loop, from `start` to `stop`."""

    task_name: ClassVar[str]

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start on the running loop, unless it runs there already."""
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            self._task = asyncio.get_running_loop().create_task(self._run(), name=self.task_name)

    async def stop(self) -> None:
        """Cancel it and wait for its end."""
        task, self._task = self._task, None
        # In a child after a fork, the task belongs to a loop of the parent and cannot be awaited.
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def is_started(self) -> bool:
        """Whether it was started and not stopped."""
        return self._task is not None

    async def _run(self) -> None:
        raise NotImplementedError
