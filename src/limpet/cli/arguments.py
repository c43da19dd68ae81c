"""What the commands take: the engine to open, values, durations, filters."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

import limpet
import limpet.sync
from limpet import codec
from limpet.engine import Address
from limpet.errors import Corrupt, InvalidValue
from limpet.model import Filter

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+\Z")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")
_TEST = re.compile(r"(?P<name>[^=!<>]+)(?P<operator>!=|<=|>=|=|<|>)(?P<value>.*)\Z", re.DOTALL)


class Setup:
    """The options that every command shares."""

    def __init__(self, url: str | None, namespace: str, as_json: bool) -> None:
        self.url = url
        self.namespace = namespace
        self.as_json = as_json

    def open(self) -> limpet.sync.Store:
        """Open the store. A command is too short-lived to sweep behind others."""
        return limpet.sync.open(self.url, namespace=self.namespace, sweep=False)

    @property
    def shown_url(self) -> str:
        """The engine's URL without its password."""
        return str(Address.parse(self.url or "sqlite:///limpet.db"))


pass_setup = click.make_pass_decorator(Setup)


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        """Seconds of ``1h30m``; a bare number is seconds."""
        if isinstance(value, int | float):
            return float(value)
        text = str(value).strip().lower()
        if _DURATION.match(text):
            return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
        try:
            return float(text)
        except ValueError:
            self.fail(f"{value!r} is not a duration: write 30s, 5m, 1h30m, 7d or seconds", param, context)


DURATION = _Duration()


def value_of(text: str, form: str | None = None) -> Any:
    """A value as it was written: JSON if it parses, else a string; @FILE and - read it from there."""
    raw = _raw(text)
    if form == "bytes":
        return raw
    try:
        readable = raw.decode()
    except UnicodeDecodeError:
        raise InvalidValue("what was read is not UTF-8: store it with --bytes") from None
    if form == "text":
        return readable
    try:
        return codec.decode(raw) if raw.strip() else readable
    except Corrupt:
        return readable


def _raw(text: str) -> bytes:
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_bytes()
        except OSError as error:
            raise InvalidValue(f"cannot read {text[1:]}: {error.strerror}") from error
    return text.encode()


def filter_of(tests: tuple[str, ...]) -> Filter | None:
    """``state=done`` and the like as one filter."""
    found: Filter | None = None
    for test in tests:
        match = _TEST.match(test)
        if match is None:
            raise click.UsageError(f"{test!r} is not FIELD=VALUE (or != < <= > >=)")
        field, value = limpet.field(match["name"]), value_of(match["value"])
        one = {
            "=": field.__eq__,
            "!=": field.__ne__,
            "<": field.__lt__,
            "<=": field.__le__,
            ">": field.__gt__,
            ">=": field.__ge__,
        }[match["operator"]](value)
        found = one if found is None else found & one
    return found
