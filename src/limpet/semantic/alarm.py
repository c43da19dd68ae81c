"""An alarm for conflicts that go on: more than so many of the writes to a namespace, for a whole window.

A conflict now and then is how optimistic writers work. When a tenth of the writes meet one for minutes, several writers
fight over the same keys and most of their work is done twice. The alarm hears of writes as the observer of a
`SemanticStore`, and tells somebody once for each time that it lasts.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from limpet.clock import Clock, SystemClock
from limpet.errors import InvalidValue
from limpet.semantic.store import Observation

__all__ = ["ConflictAlarm", "ConflictAlert"]

log = logging.getLogger("limpet.semantic")

SLICES: Final = 5
NAMESPACES_MAX: Final = 1000


class ConflictAlert(msgspec.Struct, frozen=True):
    """Conflicts that go on.

    Attributes:
        namespace: Whose writes they are.
        rate: Which part of the writes met a conflict, from 0 to 1.
        conflicts: How many did.
        writes: How many writes there were, conflicts included.
        window_s: In how many seconds.
    """

    namespace: str
    rate: float
    conflicts: int
    writes: int
    window_s: float


class _Recent:
    """The latest slices of time of a namespace: the writes of each, and how many of them met a conflict."""

    def __init__(self) -> None:
        self.slices: dict[int, list[int]] = {}
        self.is_told = False


class ConflictAlarm:
    """Raises an alert when the rate of conflicts stays above a bound.

    It stays there if it is above the bound in each fifth of the window: a burst is over with its fifth, however large
    it was. That is looked at when a fifth is over and something is written, so nothing runs in the background. Repeated
    requests that were answered with their first result count as nothing.

    Args:
        on_alert: Is told, beside the WARNING in the log of ``limpet.semantic``.
        above: The bound, from 0 to 1.
        window_s: For how long it has to stay above it.
        writes_min: How many writes the window has to have; fewer tell nothing.
        clock: What tells the time.
    """

    def __init__(
        self,
        on_alert: Callable[[ConflictAlert], None] | None = None,
        *,
        above: float = 0.1,
        window_s: float = 300.0,
        writes_min: int = 20,
        clock: Clock | None = None,
    ) -> None:
        if not (0 <= above < 1 and window_s > 0 and writes_min > 0):
            raise InvalidValue("an alarm has a bound from 0 to below 1, a window above zero, and at least one write")
        self._on_alert = on_alert
        self._above = above
        self._window_s = window_s
        self._writes_min = writes_min
        self._clock = clock or SystemClock()
        self._held: OrderedDict[str, _Recent] = OrderedDict()

    def __call__(self, observation: Observation) -> None:
        """Hear of a write."""
        if observation.outcome == "replayed":
            return
        now = int(self._clock.monotonic() * SLICES / self._window_s)
        recent = self._recent(observation.namespace)
        if now not in recent.slices:
            self._look(observation.namespace, recent, now)
            recent.slices = {number: counts for number, counts in recent.slices.items() if number > now - SLICES}
            recent.slices[now] = [0, 0]
        counts = recent.slices[now]
        counts[0] += 1
        counts[1] += observation.outcome == "conflict"

    def _recent(self, namespace: str) -> _Recent:
        found = self._held.setdefault(namespace, _Recent())
        self._held.move_to_end(namespace)
        if len(self._held) > NAMESPACES_MAX:
            # Whoever may make names up must not fill the memory with them.
            self._held.popitem(last=False)
        return found

    def _look(self, namespace: str, recent: _Recent, now: int) -> None:
        """Look at the slices that are over."""
        window = [recent.slices.get(number, [0, 0]) for number in range(now - SLICES, now)]
        writes, conflicts = (sum(counts[part] for counts in window) for part in (0, 1))
        lasts = writes >= self._writes_min and all(met > self._above * made for made, met in window)
        if lasts and not recent.is_told:
            self._tell(ConflictAlert(namespace, conflicts / writes, conflicts, writes, self._window_s))
        elif recent.is_told and not lasts:
            log.info("conflicts in namespace %s are rare again", namespace, extra={"event": "conflictsOver"})
        recent.is_told = lasts

    def _tell(self, alert: ConflictAlert) -> None:
        log.warning(
            "conflicts in namespace %s go on: %d of %d writes in %.0f s",
            alert.namespace,
            alert.conflicts,
            alert.writes,
            alert.window_s,
            extra={"event": "conflictsGoOn", **msgspec.to_builtins(alert)},
        )
        if self._on_alert is None:
            return
        try:
            self._on_alert(alert)
        except Exception as error:
            # The write that brought us here is done, and must not look as if it had failed.
            log.error("nobody took an alert of conflicts in namespace %s: %s", alert.namespace, type(error).__name__)
