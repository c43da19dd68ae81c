"""Logs: what was asked of the server and what came of it, a line each.

Every operation is a DEBUG line, `KV set: plugin=trivia key=game_123 size=45`, and the same as attributes of the record.
A slow one is a WARNING. What a caller did wrong is INFO; what is part of ordinary work (a conflict, a held lock, a rate
that is spent) stays at DEBUG, where a flood of it costs nobody a disk. What the server or its engine did wrong is an
ERROR with a traceback.

No line holds a value. Names are shown so that nobody can forge a line, or a part of one, by a key. Of an exception
that is not ours only the kind is told, because its words may hold anything.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO, Any, Final, Literal

from msgspec import UNSET

from limpet.clock import Clock, SystemClock
from limpet.codes import code_of
from limpet.errors import LimpetError, StateError, TransientError
from limpet.server import requests
from limpet.server.desk import Call
from limpet.server.limits import additions_of
from limpet.server.operations import OPERATIONS
from limpet.sweep import Round

__all__ = ["JSONFormatter", "Logs", "PlainFormatter", "configure", "reply_code", "shown", "status_of"]

log = logging.getLogger("limpet.server")

SLOW_S: Final = 0.1
SWEEP_SLOW_S: Final = 1.0
SAMPLED_ABOVE: Final = 1000
SAMPLED_ONE_OF: Final = 100
CLEANUP_INTERVAL_S: Final = 300.0

_SHOWN_MAX: Final = 200
_BREAKS_FIELDS: Final = frozenset(' "=\\')


def shown(name: str) -> str:
    """A name as it stands in a line: as it is, or quoted and escaped where it could be mistaken for more."""
    cut = name if len(name) <= _SHOWN_MAX else f"{name[:_SHOWN_MAX]}…"
    if cut and cut.isprintable() and _BREAKS_FIELDS.isdisjoint(cut):
        return cut
    return json.dumps(cut)


def status_of(error: Exception) -> int:
    """How bad an error is, as an HTTP status. One that a face made for itself may say."""
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    known = not isinstance(error, LimpetError) and isinstance(status, int)
    return status if known and status is not None else code_of(error).status


def reply_code(error: Exception) -> str:
    """The word that plugins know an error by."""
    if isinstance(error, requests.InvalidJSON):
        return "INVALID_JSON"
    if isinstance(error, requests.MissingField):
        return "MISSING_FIELD"
    return code_of(error).reply if status_of(error) >= 500 or isinstance(error, LimpetError) else "VALIDATION_ERROR"


class Logs:
    """Writes a line for every operation, and now and then one for what the sweeper did.

    An observer of the desk, and with `swept` a listener of the sweeper.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        slow_s: float = SLOW_S,
        sampled_above: int = SAMPLED_ABOVE,
        cleanup_interval_s: float = CLEANUP_INTERVAL_S,
    ) -> None:
        self._clock = clock or SystemClock()
        self._slow_s = slow_s
        self._sample = _Sample(self._clock, sampled_above)
        self._interval_s = cleanup_interval_s
        self._sum_up_at = self._clock.monotonic() + cleanup_interval_s
        self._removed, self._sweeping_s, self._failures = 0, 0.0, 0

    def done(self, call: Call) -> None:
        """Write what came of a request."""
        error = call.error
        if error is not None:
            self._failed(call, error)
        elif call.answer is None:
            log.debug("KV %s cancelled: %s", *_words(call, facts := _facts(call)), extra=facts)
        elif call.seconds - _waited_s(call) > self._slow_s:
            facts = _facts(call)
            log.warning("KV %s slow: %s latency_ms=%.1f", *_words(call, facts), facts["latency_ms"], extra=facts)
        elif log.isEnabledFor(logging.DEBUG) and self._sample.takes():
            facts = _facts(call)
            log.debug("KV %s: %s", *_words(call, facts), extra=facts)

    def _failed(self, call: Call, error: Exception) -> None:
        level = _level_of(error)
        if not log.isEnabledFor(level) or (level == logging.DEBUG and not self._sample.takes()):
            return
        code = reply_code(error)
        facts = {**_facts(call), "error_code": code}
        exc_info = _told(error) if level == logging.ERROR else None
        log.log(level, "KV %s failed: %s error=%s", *_words(call, facts), code, extra=facts, exc_info=exc_info)

    def swept(self, done: Round) -> None:
        """Add a round of the sweeper to the next summary, and write that when it is due."""
        count = sum(done.ended.values())
        if done.seconds > SWEEP_SLOW_S:
            facts: dict[str, Any] = {"op": "cleanup", "removed": count, "seconds": done.seconds}
            log.warning("KV cleanup slow: %.2fs for %d keys", done.seconds, count, extra=facts)
        self._removed += count
        self._sweeping_s += done.seconds
        self._failures += bool(done.failed)
        if self._clock.monotonic() >= self._sum_up_at:
            self._sum_up()

    def _sum_up(self) -> None:
        facts = {"op": "cleanup", "removed": self._removed, "seconds": self._sweeping_s, "failures": self._failures}
        failures = f" ({self._failures} rounds failed)" if self._failures else ""
        text = "KV cleanup: removed %d expired keys in %.2fs%s"
        log.info(text, self._removed, self._sweeping_s, failures, extra=facts)
        self._sum_up_at = self._clock.monotonic() + self._interval_s
        self._removed, self._sweeping_s, self._failures = 0, 0.0, 0


class _Sample:
    """Which DEBUG lines are written: all, or one of a hundred while there are more than so many a second."""

    def __init__(self, clock: Clock, above: int) -> None:
        self._clock = clock
        self._above = above
        self._since = clock.monotonic()
        self._count = self._skipped = 0
        self._was_busy = False

    def takes(self) -> bool:
        """Whether the next line is written."""
        now = self._clock.monotonic()
        if now - self._since >= 1.0:
            self._was_busy = self._count / (now - self._since) > self._above
            self._since, self._count = now, 0
        self._count += 1
        if not self._was_busy and self._count <= self._above:
            return True
        self._skipped = (self._skipped + 1) % SAMPLED_ONE_OF
        return self._skipped == 0


def _level_of(error: Exception) -> int:
    if status_of(error) >= 500:
        return logging.ERROR
    is_ordinary = isinstance(error, StateError | TransientError)
    return logging.DEBUG if is_ordinary else logging.INFO


def _waited_s(call: Call) -> float:
    """How long it was asked to wait for a lock, which is not slowness."""
    return float(call.asked.wait) if isinstance(call.asked, requests.Lock) else 0.0


# What a line says -------------------------------------------------------------


def _facts(call: Call) -> dict[str, Any]:
    """What a record carries besides its message. Never a value."""
    asked, plugin = call.asked, shown(call.namespace)
    op = call.operation if call.operation in OPERATIONS else shown(call.operation)
    facts: dict[str, Any] = {
        "operation": f"kv_{op}",
        "op": op,
        "plugin": plugin,
        "namespace": plugin,
        "face": call.face,
        "caller": shown(call.caller),
        "latency_ms": round(call.seconds * 1000, 3),
    }
    for member in ("key", "name", "prefix", "pattern"):
        text = getattr(asked, member, None)
        if isinstance(text, str) and (text or member == "key"):
            # `name` is taken: a record's own is that of its logger.
            facts["lock" if member == "name" else member] = shown(text)
    ttl = getattr(asked, "ttl", UNSET)
    if ttl is None or isinstance(ttl, int | float):
        facts["ttl"] = ttl
    if call.answer is not None:
        facts |= _outcome(asked, call.answer)
    return facts


def _outcome(asked: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """How much was written, or whether and how much was found."""
    found: dict[str, Any] = {}
    additions = {} if asked is None else additions_of(asked)
    if additions and not isinstance(asked, requests.Incr):
        found["size"] = sum(addition.size_bytes for addition in additions.values())
    if "exists" in answer:
        found["hit"] = answer["exists"]
    for member in ("deleted", "swapped", "count", "truncated", "revision"):
        if member in answer:
            found[member] = answer[member]
    return found


_TOLD: Final = ("key", "lock", "prefix", "pattern", "size", "hit", "deleted", "swapped", "count", "truncated", "ttl")


def _words(call: Call, facts: dict[str, Any]) -> tuple[str, str]:
    told = [f"plugin={facts['plugin']}"]
    told += [f"{name}={_plain(facts[name])}" for name in _TOLD if facts.get(name) is not None]
    return facts["op"], " ".join(told)


def _plain(fact: Any) -> str:
    return str(fact).lower() if isinstance(fact, bool) else str(fact)


class Failure(Exception):
    """What went wrong, as a log may show it."""


def _told(error: BaseException, depth: int = 8) -> Failure:
    """An exception and what caused it, with their tracebacks, and words only where they are ours."""
    kind = type(error).__qualname__
    told = Failure(f"{kind}: {error}" if isinstance(error, LimpetError) else f"{kind} (what it says may hold a value)")
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    told.__cause__ = None if cause is None or depth == 0 else _told(cause, depth - 1)
    return told.with_traceback(error.__traceback__)


# Setting them up --------------------------------------------------------------

# What every record has. The rest are facts.
_OF_EVERY_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class PlainFormatter(logging.Formatter):
    """For people: ``2025-11-22 10:30:45 DEBUG [limpet.server] KV set: …``, in UTC."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s [%(name)s] %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The line, which stays one whatever is in it. A traceback follows on lines of its own."""
        text = super().formatMessage(record)
        return text if text.isprintable() else "".join(map(_visible, text))


class JSONFormatter(logging.Formatter):
    """For programs: one JSON object a line, with the facts as members."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        document = {
            "at": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: fact for name, fact in vars(record).items() if name not in _OF_EVERY_RECORD},
        }
        if record.exc_info and record.exc_info[0] is not None:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=lambda thing: type(thing).__name__)


def configure(
    level: str = "INFO", form: Literal["plain", "json"] = "plain", stream: IO[str] | None = None
) -> logging.Handler:
    """Have everything that Limpet logs written to a stream, standard error unless told. A later call replaces this."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JSONFormatter() if form == "json" else PlainFormatter())
    handler.set_name("limpet")
    ours = logging.getLogger("limpet")
    for former in [one for one in ours.handlers if one.get_name() == "limpet"]:
        ours.removeHandler(former)
    ours.addHandler(handler)
    ours.setLevel(level.upper())
    ours.propagate = False
    return handler


def _visible(letter: str) -> str:
    return letter if letter.isprintable() else json.dumps(letter)[1:-1]
