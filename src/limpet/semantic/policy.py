"""The retry policy, as data: how often to try again, how long apart, and when to escalate.

There are three kinds of failures. After a conflict, the write is tried again on the new state after exactly 1, 2, 4, 8,
16 and 32 seconds, and then escalated. A transient failure is tried five times with jitter, and then escalated. Anything
else fails at once. An outage spans calls: it begins with a failure, ends with a success, and raises one alert when it
has lasted for five minutes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec

from limpet.clock import Clock
from limpet.errors import Ambiguous, Conflict, Contention, LimpetError, StateError, TransientError, Unavailable

__all__ = ["Escalated", "OutageAlert", "OutageMonitor", "RetryPolicy", "classify", "run_with_policy"]

log = logging.getLogger("limpet.semantic")

T = TypeVar("T")

FailureKind = Literal["conflict", "transient", "fatal"]


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often to try again, and how long apart.

    Attributes:
        conflict_pauses_s: How long to wait after each conflict. After the last pause, the write is escalated.
        transient_attempts: How many attempts to make while failures are transient. Then the write is escalated.
        transient_first_s: How long to wait after the first failure; twice as long after each further one.
        transient_longest_s: How long to wait at most.
        jitter: By which part of itself a pause after a transient failure may be shorter or longer.
        outage_alert_s: After how many seconds without a success an alert is raised.
    """

    conflict_pauses_s: tuple[float, ...] = (1, 2, 4, 8, 16, 32)
    transient_attempts: int = 5
    transient_first_s: float = 0.5
    transient_longest_s: float = 32.0
    jitter: float = 0.5
    outage_alert_s: float = 300.0

    def pause_s(self, failure: FailureKind, count: int, dice: Callable[[], float] = random.random) -> float | None:
        """How long to wait after the n-th failure of a kind; None when no attempt is left."""
        if failure == "conflict":
            return self.conflict_pauses_s[count - 1] if count <= len(self.conflict_pauses_s) else None
        if failure == "fatal" or count >= self.transient_attempts:
            return None
        pause_s = min(self.transient_longest_s, self.transient_first_s * 2.0 ** (count - 1))
        return pause_s * (1 - self.jitter + 2 * self.jitter * dice())


class Escalated(Contention):
    """The attempts are used up, and a person has to decide.

    Attributes:
        key: The key.
        attempts: How many attempts were made.
        cause_code: The code of the last error, which is its ``__cause__``.
        letter: The dead letter that holds the write; None where none was kept.
        request_id: The request id, as in the log.
    """

    code = "escalated"
    retryable = False

    def __init__(self, key: str, *, attempts: int, cause: LimpetError, letter: str | None, request_id: str) -> None:
        super().__init__(key, attempts=attempts)
        kept = "nothing was kept of it" if letter is None else f"it is kept as dead letter {letter}"
        self.args = (f"{key!r} failed {attempts} times, the last time with {cause.code}: {kept}",)
        self.cause_code, self.letter, self.request_id = cause.code, letter, request_id


def classify(error: LimpetError) -> FailureKind:
    """Which kind of failure this is."""
    if isinstance(error, TransientError | Ambiguous) and not isinstance(error, Escalated):
        return "transient"
    if isinstance(error, Conflict) and error.reason != "stale_request":
        return "conflict"
    # A request id that was used for another request stays used, however long one waits.
    return "fatal"


class OutageAlert(msgspec.Struct, frozen=True):
    """An outage that lasts.

    Attributes:
        namespace: Whose store it is.
        lasted_s: For how many seconds there was no success.
        code: The code of the last error.
    """

    namespace: str
    lasted_s: float
    code: str


class OutageMonitor:
    """Whether a store can be reached, over all calls. Raises one alert for each outage that lasts."""

    def __init__(
        self, namespace: str, clock: Clock, after_s: float, on_outage: Callable[[OutageAlert], None] | None
    ) -> None:
        self._namespace = namespace
        self._clock = clock
        self._after_s = after_s
        self._on_outage = on_outage
        self._since: float | None = None
        self._is_reported = False

    @property
    def lasts_s(self) -> float | None:
        """For how long there was no success; None when all is well."""
        return None if self._since is None else self._clock.monotonic() - self._since

    def record_success(self) -> None:
        """End the outage: a call succeeded."""
        if self._is_reported:
            log.info("the store of namespace %s can be reached again", self._namespace)
        self._since, self._is_reported = None, False

    def record_failure(self, error: LimpetError) -> None:
        """Begin or continue an outage, if the call failed because the store could not be reached."""
        # Any other error of the store is a reply, so the store can be reached.
        if not isinstance(error, Unavailable | Ambiguous):
            if isinstance(error, StateError | TransientError):
                self.record_success()
            return
        if self._since is None:
            self._since = self._clock.monotonic()
        lasted_s = self._clock.monotonic() - self._since
        if lasted_s > self._after_s and not self._is_reported:
            self._is_reported = True
            log.error("the store of namespace %s could not be reached for %.0f s", self._namespace, lasted_s)
            if self._on_outage is not None:
                self._on_outage(OutageAlert(self._namespace, lasted_s, error.code))


async def run_with_policy(
    policy: RetryPolicy,
    clock: Clock,
    work: Callable[[int], Awaitable[T]],
    *,
    give_up: Callable[[LimpetError, int], Awaitable[Escalated]],
    outage: OutageMonitor | None = None,
    dice: Callable[[], float] = random.random,
) -> T:
    """Run work under a policy.

    Args:
        policy: How often to try again, and how long apart.
        clock: The clock to wait on.
        work: Gets the number of the attempt, from 1. It reads the state again each time.
        give_up: Makes the error to raise when no attempt is left.
        outage: Records successes and failures.
        dice: Returns a random number from 0 to 1, for the jitter.
    """
    counts: dict[FailureKind, int] = {"conflict": 0, "transient": 0, "fatal": 0}
    attempt = 0
    while True:
        attempt += 1
        try:
            result = await work(attempt)
        except LimpetError as error:
            failure = classify(error)
            counts[failure] += 1
            if outage is not None:
                outage.record_failure(error)
            if failure == "fatal":
                raise
            pause_s = policy.pause_s(failure, counts[failure], dice)
            if pause_s is None:
                raise await give_up(error, attempt) from error
        else:
            if outage is not None:
                outage.record_success()
            return result
        await clock.sleep(pause_s)
