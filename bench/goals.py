"""The goals: for each judged figure, a line that it must pass, and a more ambitious one."""

from __future__ import annotations

from typing import Final, NamedTuple


class Goal(NamedTuple):
    """A figure's aim. Where ``lower`` is better, the figure must not be above the line, else not below it."""

    passing: float
    moonshot: float | None = None
    lower: bool = False

    def is_met_by(self, figure: float) -> bool:
        return figure <= self.passing if self.lower else figure >= self.passing

    def is_surpassed_by(self, figure: float) -> bool:
        if self.moonshot is None:
            return False
        return figure <= self.moonshot if self.lower else figure >= self.moonshot


MEMORY_GET: Final = Goal(5, 6)
MEMORY_PUT: Final = Goal(2, 2.5)
PUT_OF_ONE_BY_ONE: Final = Goal(5, 8)
PUT_OF_LANGGRAPH: Final = Goal(1.2, 2)
PUT_OF_RAW: Final = Goal(0.45, 0.85)
GET_OF_BEST: Final = Goal(2.8, 12)
BLOCKING_GET: Final = Goal(1.3, 6)
BLOCKING_PUT_NORMAL: Final = Goal(0.9, 1.6)
BLOCKING_PUT_FULL: Final = Goal(0.8, 1)
DURABLE_OF_NOT: Final = Goal(0.65, 0.9)
LAG_OF_WRITERS: Final = Goal(2.5, 1.5, lower=True)
LAG_OF_READERS: Final = Goal(10, 4, lower=True)
SWEEP_S: Final = Goal(0.3, 0.2, lower=True)
SWEEP_STALL_MS: Final = Goal(50, 20, lower=True)
SWEEP_AUDIT: Final = Goal(1)
FOOTPRINT: Final = Goal(0.75, 0.55, lower=True)
IMPORT_MS: Final = Goal(100, lower=True)
COMMAND_MS: Final = Goal(250, lower=True)
PREFIX_MS: Final = Goal(10, lower=True)
SERVED_MB: Final = Goal(50, lower=True)
# Of the cost in the smallest store.
GROWTH_OF_SQLITE_PUT: Final = Goal(2, 1.5, lower=True)
NATS_STATUS_MS: Final = Goal(5, 1, lower=True)
WATCH_PUT_MS: Final = Goal(1, 0.1, lower=True)
WATCH_HOLD_MS: Final = Goal(20, lower=True)
WATCH_FOREIGN_MS: Final = Goal(5, 3, lower=True)
POSTGRES: Final = {
    "put": (Goal(4, 6), Goal(1.1, 1.3), Goal(0.5, 0.65)),
    "get": (Goal(8, 12), Goal(3.5, 5), None),
}
POSTGRES_ALONE: Final = {"put": Goal(1.1, 1.5), "get": Goal(1.4, 2.2)}
POSTGRES_PROCESSES: Final = Goal(1)
# The cost that the store may add to the server's work, which we cannot make faster.
OF_BY_HAND: Final = Goal(0.7, 0.9)
REDIS: Final = {"put": (Goal(4.5, 6), Goal(0.4, 0.6)), "get": (Goal(6.5, 9), Goal(0.6, 0.9))}
REDIS_ALONE: Final = {"put": Goal(0.75, 0.9), "get": Goal(0.75, 1.2)}
NATS: Final = {"put": Goal(1.25, 1.5), "get": Goal(1.6, 3)}
NATS_PUT_BY_CPU: Final = Goal(1.5, 2)
NATS_SYNCED: Final = {64: Goal(2.5, 4), 512: Goal(8, 12)}
# Beside the driver by hand: alone, what the store may add to a call; at 64 callers it groups, and the driver does not.
REDIS_WRITES: Final = {
    "guarded": Goal(0.85, 1),
    "guarded@64": Goal(2, 4),
    "batch": Goal(0.6, 0.85),
    "batch@64": Goal(0.8, 1.5),
}
POSTGRES_WRITES: Final = {
    "guarded": Goal(0.85, 1),
    "guarded@64": Goal(2, 4),
    "batch": Goal(0.7, 1),
    "batch@64": Goal(1, 2),
}
SQLITE_WRITES: Final = {
    "guarded": Goal(0.7, 0.9),
    "guarded@64": Goal(3, 6),
    "batch": Goal(0.6, 0.9),
    "batch@64": Goal(1.5, 3),
}
NATS_WRITES: Final = {"guarded": Goal(0.9, 1.2), "guarded@64": Goal(1.6, 2.5)}
# Of several processes on a hot key: the slowest must get half of what the fastest gets.
HOT_SLOWEST: Final = Goal(0.5)
HTTP: Final = {"put": Goal(1.1, 1.7), "get": Goal(2, 4)}
HTTP_CLIENT_US: Final = Goal(250, 150, lower=True)
FILTER_SQLITE: Final = Goal(100, 190)
FILTER_POSTGRES: Final = Goal(30, 55)
FILTER_REDIS: Final = Goal(1000, 10_000)
POSTGRES_SWEEP_S: Final = Goal(1, lower=True)
POSTGRES_PREFIX: Final = Goal(50)
