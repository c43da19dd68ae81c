"""Logs: a line for every request, with its outcome.

Every operation is a DEBUG line, `KV set: plugin=trivia key=game_123 size=45`, and the same as attributes of the record.
A slow one is a WARNING. A mistake of a caller is INFO; refusals of ordinary work (a conflict, a held lock, a spent
rate) stay at DEBUG, where a flood of them fills no disk. For a request without a reply the log is the only record, so
that both are a WARNING. An error of the server or its engine is an ERROR with a traceback.

A line about a failure has its code and its reason. No line holds a value. In the text, names are quoted where they
could forge a line, or a part of one; the attributes of a record are as they are. For an error of an engine or a driver
only the kind is shown, because its message may hold anything.
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
from limpet.retry import reason_of
from limpet.server import requests
from limpet.server.additions import additions_of
from limpet.server.dispatch import Call
from limpet.server.outcome import quote_name, redact, reply_code, status_of
from limpet.server.wording import Public
from limpet.sweep import Round

__all__ = ["JSONFormatter", "Logs", "PlainFormatter", "configure"]

log = logging.getLogger("limpet.server")

SLOW_S: Final = 0.1
SWEEP_SLOW_S: Final = 1.0
SAMPLED_ABOVE: Final = 1000
SAMPLED_ONE_OF: Final = 100
CLEANUP_INTERVAL_S: Final = 300.0

_FACT_MAX: Final = 1024


class Logs:
    """Writes a line for every operation, and a summary of the sweeper now and then.

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
        """Write the line of a finished request."""
        error = call.error
        if error is not None:
            self._write_failure(call, error)
        elif call.answer is None:
            log.debug("KV %s cancelled: %s", *_format(facts := _facts(call)), extra=facts)
        elif (reason := getattr(call.request, "reason", None)) is not None:
            facts = {**_facts(call), "reason": reason}
            text = "KV %s of a lock by force: %s caller=%s reason=%s"
            log.warning(text, *_format(facts), quote_name(facts["caller"]), quote_name(reason), extra=facts)
        elif call.seconds - _waited_s(call) > self._slow_s:
            facts = _facts(call)
            log.warning("KV %s slow: %s latency_ms=%.1f", *_format(facts), facts["latency_ms"], extra=facts)
        elif log.isEnabledFor(logging.DEBUG) and self._sample.takes():
            facts = _facts(call)
            log.debug("KV %s: %s", *_format(facts), extra=facts)

    def _write_failure(self, call: Call, error: Exception) -> None:
        level = _level_of(call, error)
        if not log.isEnabledFor(level) or (level == logging.DEBUG and not self._sample.takes()):
            return
        facts = {**_facts(call), "error_code": reply_code(error), "reason": _reason(error)}
        field = getattr(error, "field", None)
        if isinstance(field, str):
            facts["field"] = field
        texts = (*_format(facts), facts["error_code"], quote_name(facts["reason"]))
        exc_info = redact(error) if level == logging.ERROR else None
        log.log(level, "KV %s failed: %s error=%s reason=%s", *texts, extra=facts, exc_info=exc_info)

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
    """Why a request failed: the message if it is ours, otherwise the kinds of the errors."""
    is_ours = isinstance(error, RequestError | StateError | TransientError | Public) and status_of(error) < 500
    if not is_ours:
        return reason_of(error)
    # The message for an error of an engine is fixed (`limpet.server.wording`). Its kind says more.
    behind = f" ({reason_of(error.__cause__)})" if isinstance(error.__cause__, LimpetError) else ""
    return _cut(str(error)) + behind


def _waited_s(call: Call) -> float:
    """How long the request may wait for a lock, which is not slowness."""
    return float(call.request.wait) if isinstance(call.request, requests.Lock) else 0.0


# The facts of a line ----------------------------------------------------------


def _facts(call: Call) -> dict[str, Any]:
    """The attributes of a record, as they are. Never a value."""
    request, plugin, op = call.request, _cut(call.namespace), _cut(call.operation)
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
        text = getattr(request, member, None)
        if isinstance(text, str) and (text or member == "key"):
            # `name` is taken: a record's own is that of its logger.
            facts["lock" if member == "name" else member] = _cut(text)
    if isinstance(request, requests.Primitive) and request.reason is not None:
        facts["lock"] = _cut(", ".join(write.key for write in request.what.writes if write.family == "lock"))
    ttl = getattr(request, "ttl", UNSET)
    if ttl is None or isinstance(ttl, int | float):
        facts["ttl"] = ttl
    if call.answer is not None:
        facts |= _outcome(request, call.answer)
    return facts


def _cut(text: str) -> str:
    return text if len(text) <= _FACT_MAX else f"{text[:_FACT_MAX]}…"


def _outcome(request: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """How much was written, or whether and how much was found."""
    found: dict[str, Any] = {}
    additions = {} if request is None else additions_of(request)
    if additions and not isinstance(request, requests.Incr):
        found["size"] = sum(addition.size_bytes for addition in additions.values())
    if "exists" in answer:
        found["hit"] = answer["exists"]
    for member in ("deleted", "swapped", "count", "truncated", "revision"):
        if member in answer:
            found[member] = answer[member]
    return found


_IN_TEXT: Final = (
    *("subject", "key", "lock", "prefix", "pattern"),
    *("size", "hit", "deleted", "swapped", "count", "truncated", "ttl"),
)


def _format(facts: dict[str, Any]) -> tuple[str, str]:
    """The operation and the facts of a line, in a form that no name can forge."""
    texts = [f"plugin={quote_name(facts['plugin'])}"]
    texts += [f"{name}={_plain(facts[name])}" for name in _IN_TEXT if facts.get(name) is not None]
    return quote_name(facts["op"] or "request"), " ".join(texts)


def _plain(fact: Any) -> str:
    if isinstance(fact, str):
        return quote_name(fact)
    return str(fact).lower() if isinstance(fact, bool) else str(fact)


# Setting them up --------------------------------------------------------------

# The attributes of every record. All others are facts.
_OF_EVERY_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class PlainFormatter(logging.Formatter):
    """For people: ``2025-11-22 10:30:45 DEBUG [limpet.server] KV set: …``, in UTC."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s [%(name)s] %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """Format the line, and escape what would break it in two. A traceback follows on lines of its own."""
        text = super().formatMessage(record)
        return text if text.isprintable() else "".join(map(_escape, text))


class JSONFormatter(logging.Formatter):
    """For programs: one JSON object a line, with the facts as members."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as JSON."""
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
    """Write everything that Limpet logs to a stream, by default standard error. A later call replaces this one."""
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


def _escape(letter: str) -> str:
    return letter if letter.isprintable() else json.dumps(letter)[1:-1]
