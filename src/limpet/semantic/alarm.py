"""An alarm for conflicts that go on: a large part of the writes to a namespace, for a whole window.

A conflict now and then is normal for optimistic writers. When a tenth of the writes meet one for minutes, several
writers compete for the same keys and most of their work is done twice. The alarm is an observer of a `SemanticStore`,
and raises one alert for each such period.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from limpet.clock import Clock, SystemClock
from limpet.errors import InvalidValue
from limpet.semantic.observe import Observation

__all__ = ["ConflictAlarm", "ConflictAlert"]

log = logging.getLogger("limpet.semantic")

PARTS: Final = 5
"""Into how many parts a window is divided."""
NAMESPACES_MAX: Final = 1000


class ConflictAlert(msgspec.Struct, frozen=True):
    """Conflicts that go on.

    Attributes:
        namespace: The namespace.
        rate: Which part of the writes met a conflict, from 0 to 1.
        conflicts: How many writes met a conflict.
        writes: How many writes there were, conflicts included.
        window_s: In how many seconds.
    """

    namespace: str
    rate: float
    conflicts: int
    writes: int
    window_s: float


class _Counters:
    """The latest parts of the window of a namespace: in each, the writes and how many of them met a conflict."""

    def __init__(self) -> None:
        self.parts: dict[int, list[int]] = {}
        self.is_reported = False


class ConflictAlarm:
    """Raises an alert when the rate of conflicts stays above a bound.

    It must be above the bound in each fifth of the window, so that a burst ends with its fifth, however large it was.
    The rate is checked at the first write after a fifth is over; nothing runs in the background. A repeated request
    that got its first result again is not counted.

    Args:
        on_alert: Called with the alert, beside the WARNING in the log of ``limpet.semantic``.
        above: The bound, from 0 to 1.
        window_s: For how long the rate has to stay above it.
        writes_min: How many writes the window needs; fewer raise no alert.
        clock: The clock.
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
            raise InvalidValue("an alarm needs a bound from 0 to below 1, a window above zero, and at least one write")
        self._on_alert = on_alert
        self._above = above
        self._window_s = window_s
        self._writes_min = writes_min
        self._clock = clock or SystemClock()
        self._counters: OrderedDict[str, _Counters] = OrderedDict()

    def __call__(self, observation: Observation) -> None:
        """Count a write."""
        if observation.outcome == "replayed":
            return
        now = int(self._clock.monotonic() * PARTS / self._window_s)
        counters = self._counters_of(observation.namespace)
        if now not in counters.parts:
            self._check_rate(observation.namespace, counters, now)
            counters.parts = {number: counts for number, counts in counters.parts.items() if number > now - PARTS}
            counters.parts[now] = [0, 0]
        counts = counters.parts[now]
        counts[0] += 1
        counts[1] += observation.outcome == "conflict"

    def _counters_of(self, namespace: str) -> _Counters:
        found = self._counters.setdefault(namespace, _Counters())
        self._counters.move_to_end(namespace)
        if len(self._counters) > NAMESPACES_MAX:
            # A caller that may invent names must not fill the memory with them.
            self._counters.popitem(last=False)
        return found

    def _check_rate(self, namespace: str, counters: _Counters, now: int) -> None:
        """Check the parts that are over."""
        window = [counters.parts.get(number, [0, 0]) for number in range(now - PARTS, now)]
        writes, conflicts = (sum(counts[part] for counts in window) for part in (0, 1))
        lasts = writes >= self._writes_min and all(met > self._above * made for made, met in window)
        if lasts and not counters.is_reported:
            self._raise_alert(ConflictAlert(namespace, conflicts / writes, conflicts, writes, self._window_s))
        elif counters.is_reported and not lasts:
            log.info("conflicts in namespace %s are rare again", namespace, extra={"event": "conflictsOver"})
        counters.is_reported = lasts

    def _raise_alert(self, alert: ConflictAlert) -> None:
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
            # The write that was observed is done, and must not look as if it had failed.
            log.error("the alert of conflicts in namespace %s failed: %s", alert.namespace, type(error).__name__)
