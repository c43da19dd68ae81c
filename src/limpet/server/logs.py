"""Logs: what was asked of the server and what came of it, a line each.

Every operation is a DEBUG line, `KV set: plugin=trivia key=game_123 size=45`, and the same as attributes of the record.
A slow one is a WARNING. What a caller did wrong is INFO; what is part of ordinary work (a conflict, a held lock, a rate
that is spent) stays at DEBUG, where a flood of it costs nobody a disk. Where nobody waits for a reply, the log is the
only place that tells, and both are a WARNING. What the server or its engine did wrong is an ERROR with a traceback.

A line about a failure has its code and its reason. No line holds a value. In the text, names are quoted where they
could forge a line, or a part of one; the attributes of a record are as they are. Of an error that an engine or a driver
raised only the kind is shown, because its words may hold anything.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO, Any, Final, Literal

from msgspec import UNSET

from limpet.clock import Clock, SystemClock
from limpet.errors import LimpetError, RequestError, StateError, TransientError
from limpet.protocol.codes import code_of
from limpet.retry import reason_of
from limpet.server import requests
from limpet.server.dispatch import Call
from limpet.server.limits import additions_of
from limpet.server.nats_errors import reply_code
from limpet.server.wording import Public
from limpet.sweep import Round

__all__ = ["JSONFormatter", "Logs", "PlainFormatter", "configure", "failure_of", "shown", "status_of"]

log = logging.getLogger("limpet.server")

SLOW_S: Final = 0.1
SWEEP_SLOW_S: Final = 1.0
SAMPLED_ABOVE: Final = 1000
SAMPLED_ONE_OF: Final = 100
CLEANUP_INTERVAL_S: Final = 300.0

_SHOWN_MAX: Final = 200
_FACT_MAX: Final = 1024
_BREAKS_FIELDS: Final = frozenset(' "=\\')


def shown(name: str) -> str:
    """A name as it stands in a text line: as it is, or quoted and escaped where it could be mistaken for more."""
    cut = name if len(name) <= _SHOWN_MAX else f"{name[:_SHOWN_MAX]}…"
    if cut and cut.isprintable() and _BREAKS_FIELDS.isdisjoint(cut):
        return cut
    return json.dumps(cut)


def status_of(error: Exception) -> int:
    """How bad an error is, as an HTTP status. One that a face made for itself may say."""
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    known = not isinstance(error, LimpetError) and isinstance(status, int)
    return status if known and status is not None else code_of(error).status


class Logs:
    """Writes a line for every operation, and now and then one for what the sweeper did.

    An observer of the dispatcher, and with `swept` a listener of the sweeper.
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
            log.debug("KV %s cancelled: %s", *_words(facts := _facts(call)), extra=facts)
        elif (reason := getattr(call.asked, "reason", None)) is not None:
            facts = {**_facts(call), "reason": reason}
            text = "KV %s of a lock by force: %s caller=%s reason=%s"
            log.warning(text, *_words(facts), shown(facts["caller"]), shown(reason), extra=facts)
        elif call.seconds - _waited_s(call) > self._slow_s:
            facts = _facts(call)
            log.warning("KV %s slow: %s latency_ms=%.1f", *_words(facts), facts["latency_ms"], extra=facts)
        elif log.isEnabledFor(logging.DEBUG) and self._sample.takes():
            facts = _facts(call)
            log.debug("KV %s: %s", *_words(facts), extra=facts)

    def _failed(self, call: Call, error: Exception) -> None:
        level = _level_of(call, error)
        if not log.isEnabledFor(level) or (level == logging.DEBUG and not self._sample.takes()):
            return
        facts = {**_facts(call), "error_code": reply_code(error), "reason": _reason(error)}
        field = getattr(error, "field", None)
        if isinstance(field, str):
            facts["field"] = field
        told = (*_words(facts), facts["error_code"], shown(facts["reason"]))
        exc_info = failure_of(error) if level == logging.ERROR else None
        log.log(level, "KV %s failed: %s error=%s reason=%s", *told, extra=facts, exc_info=exc_info)

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
        if self._removed:
            failures = f" ({self._failures} rounds failed)" if self._failures else ""
            text = "KV cleanup: removed %d expired keys in %.2fs%s"
            log.info(text, self._removed, self._sweeping_s, failures, extra=facts)
        elif self._failures:
            log.warning("KV cleanup: %d rounds failed", self._failures, extra=facts)
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


def _level_of(call: Call, error: Exception) -> int:
    if status_of(error) >= 500:
        return logging.ERROR
    if isinstance(error, TransientError):
        return logging.DEBUG
    if not call.has_reply:
        return logging.WARNING
    return logging.DEBUG if isinstance(error, StateError) else logging.INFO


def _reason(error: Exception) -> str:
    """Why a request failed: in words where they are ours, and otherwise by the kinds of the errors."""
    is_ours = isinstance(error, RequestError | StateError | TransientError | Public) and status_of(error) < 500
    if not is_ours:
        return reason_of(error)
    # What an engine refuses is told in words that fit every case. Its kind tells more.
    behind = f" ({reason_of(error.__cause__)})" if isinstance(error.__cause__, LimpetError) else ""
    return _cut(str(error)) + behind


def _waited_s(call: Call) -> float:
    """How long it was asked to wait for a lock, which is not slowness."""
    return float(call.asked.wait) if isinstance(call.asked, requests.Lock) else 0.0


# What a line says -------------------------------------------------------------


def _facts(call: Call) -> dict[str, Any]:
    """What a record carries besides its message, as it is. Never a value."""
    asked, plugin, op = call.asked, _cut(call.namespace), _cut(call.operation)
    facts: dict[str, Any] = {
        "operation": f"kv_{op}",
        "op": op,
        "plugin": plugin,
        "namespace": plugin,
        "face": call.face,
        "caller": _cut(call.caller),
        "latency_ms": round(call.seconds * 1000, 3),
    }
    if call.subject is not None:
        facts["subject"] = _cut(call.subject)
    for member in ("key", "name", "prefix", "pattern"):
        text = getattr(asked, member, None)
        if isinstance(text, str) and (text or member == "key"):
            # `name` is taken: a record's own is that of its logger.
            facts["lock" if member == "name" else member] = _cut(text)
    if isinstance(asked, requests.Primitive) and asked.reason is not None:
        facts["lock"] = _cut(", ".join(write.key for write in asked.what.writes if write.family == "lock"))
    ttl = getattr(asked, "ttl", UNSET)
    if ttl is None or isinstance(ttl, int | float):
        facts["ttl"] = ttl
    if call.answer is not None:
        facts |= _outcome(asked, call.answer)
    return facts


def _cut(text: str) -> str:
    return text if len(text) <= _FACT_MAX else f"{text[:_FACT_MAX]}…"


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


_TOLD: Final = (
    *("subject", "key", "lock", "prefix", "pattern"),
    *("size", "hit", "deleted", "swapped", "count", "truncated", "ttl"),
)


def _words(facts: dict[str, Any]) -> tuple[str, str]:
    """The operation and the facts of a line, in a form that nobody can forge by a name."""
    told = [f"plugin={shown(facts['plugin'])}"]
    told += [f"{name}={_plain(facts[name])}" for name in _TOLD if facts.get(name) is not None]
    return shown(facts["op"] or "request"), " ".join(told)


def _plain(fact: Any) -> str:
    if isinstance(fact, str):
        return shown(fact)
    return str(fact).lower() if isinstance(fact, bool) else str(fact)


class Failure(Exception):
    """What went wrong, as a log may show it."""


def failure_of(error: BaseException, depth: int = 8) -> Failure:
    """An exception and what caused it, with their tracebacks: by their kinds, without their words."""
    made = Failure(reason_of(error).partition(" from ")[0])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    made.__cause__ = None if cause is None or depth == 0 else failure_of(cause, depth - 1)
    return made.with_traceback(error.__traceback__)


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
