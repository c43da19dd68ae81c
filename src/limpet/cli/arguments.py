"""The arguments of the commands: the store to open, values, durations, filters."""

from __future__ import annotations

import asyncio
import functools
import operator
import os
import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import IO, Any, Final, TypeVar
from urllib.parse import quote

import click
import msgspec

import limpet
import limpet.sync
from limpet.cli.failure import Missing
from limpet.errors import InvalidValue, LimpetError
from limpet.keys import VALUE_BYTES_MAX
from limpet.model import Filter
from limpet.urls import Address

T = TypeVar("T")

URL_DEFAULT: Final = "sqlite:///limpet.db"
INPUT_BYTES_MAX: Final = 16 * VALUE_BYTES_MAX
"""More than a value may have, because JSON may be written with spaces that are not stored; but bounded."""

COMPLETIONS_MAX: Final = 100

_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_DURATION: Final = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in ("d", "h", "m", "s", "ms")))
_UNITS_S: Final = (86_400.0, 3_600.0, 60.0, 1.0, 0.001)
_TEST: Final = re.compile(r"(?P<name>[^=!<>]+)(?P<operator>!=|<=|>=|=|<|>)(?P<value>.*)", re.DOTALL)
# Up to a bar that is neither escaped nor inside a JSON string.
_ALTERNATIVE: Final = re.compile(r'(?:"(?:[^"\\]|\\.)*"|\\.|[^|])*', re.DOTALL)
_NAME: Final = re.compile(r"(?:\\.|[^.])+", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\([.|\\])")


class Setup:
    """The options that every command shares."""

    def __init__(self, url: str | None, namespace: str, as_json: bool, writer: str | None = None) -> None:
        self.url = url or URL_DEFAULT
        self.is_default = not url
        self.namespace = namespace
        self.as_json = as_json
        self.writer = writer

    def choose(self, name: str, chosen: Any) -> None:
        """Set an option that was given after the command. It overrides one before the command."""
        if name == "url":
            self.url, self.is_default = chosen or URL_DEFAULT, not chosen
        else:
            setattr(self, name, chosen)

    def open(self, *, make: bool = False, sweep: bool = False) -> limpet.sync.Store:
        """Open the store.

        Only a command that writes may make it: a read in the wrong folder would otherwise leave an empty file there,
        and find nothing. A command that ends at once does not sweep; one that keeps running does.
        """
        self.check(make=make)
        return limpet.sync.open(self.url, namespace=self.namespace, sweep=sweep, writer=self.writer)

    def run(self, work: Callable[[limpet.Store], Coroutine[Any, Any, T]], *, make: bool = False) -> T:
        """Run work with the store on an event loop."""
        self.check(make=make)

        async def open_and_work() -> T:
            async with limpet.open(self.url, namespace=self.namespace, sweep=False, writer=self.writer) as store:
                return await work(store)

        return asyncio.run(open_and_work())

    def check(self, *, make: bool) -> None:
        """Check that the store exists, or that it may be made."""
        address = Address.parse(self.url)
        if address.scheme == "memory":
            raise InvalidValue(
                f"{address} ends with the process that opens it, and every limpet command is its own process: "
                "name a file, such as sqlite:///state.db"
            )
        file = self.file
        if file is not None and not file.exists():
            if not make:
                raise Missing(f"there is no store at {address}{self.why}: no such file", _WHERE_ELSE)
            if sys.stderr is not None and sys.stderr.isatty():
                click.echo(f"limpet: making {file}", err=True)

    @property
    def file(self) -> Path | None:
        """The file of the store; None where it is not in a file."""
        address = Address.parse(self.url)
        return Path(address.path[3:]) if address.scheme == "sqlite" and address.path.startswith("///") else None

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        try:
            return str(Address.parse(self.url))
        except InvalidValue:
            return "a malformed URL"

    @property
    def why(self) -> str:
        """Why this URL is used, where none was given."""
        return " (the default, because neither --url nor LIMPET_URL is given)" if self.is_default else ""

    @property
    def place(self) -> str:
        """The namespace and the store, for messages."""
        return f"namespace {self.namespace!r} of {self.shown_url}"

    @property
    def absolute_url(self) -> str:
        """The URL for a process that may run in another folder."""
        file = self.file
        if file is None or file.is_absolute():
            return self.url
        scheme, _, rest = self.url.partition(":")
        return f"{scheme}:///{quote(os.getcwd())}/{rest.removeprefix('///')}"


_WHERE_ELSE: Final = "A write makes it ('limpet put KEY VALUE'); --url or LIMPET_URL names another."

pass_setup = click.make_pass_decorator(Setup)


def duration(text: str) -> float:
    """The seconds of a duration such as ``1h30m``; a bare number is seconds."""
    written = text.strip().lower()
    if re.fullmatch(_NUMBER, written):
        return float(written)
    found = _DURATION.fullmatch(written)
    if found is None or not written:
        raise click.BadParameter(f"{text!r} is not a duration: write 250ms, 30s, 5m, 1h30m, 7d, or seconds")
    return sum(float(number) * unit_s for number, unit_s in zip(found.groups(), _UNITS_S, strict=True) if number)


def position(text: str) -> str | int:
    """The position of an event, or a revision."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else text


# Values -----------------------------------------------------------------------


def value_of(text: str, form: str | None = None) -> Any:
    """A value from an argument: JSON if it parses, else a string; @FILE and - read it from there."""
    if text == "-":
        return _decode(_read_bounded(sys.stdin.buffer, "standard input"), form, "standard input")
    if not text.startswith("@"):
        return _decode(os.fsencode(text), form, "the value")
    try:
        with Path(text[1:]).open("rb") as file:
            return _decode(_read_bounded(file, text[1:]), form, text[1:])
    except OSError as error:
        raise InvalidValue(
            f"cannot read {text[1:]!r}: {error.strerror}. A text that starts with @ is written as JSON: '\"@...\"'"
        ) from error


def literal_of(text: str) -> Any:
    """A value from the argument itself: JSON if it parses, else a string."""
    return _decode(os.fsencode(text), None, "the value")


def fields_of(assignments: tuple[str, ...]) -> dict[str, Any]:
    """``state=done`` and the like as fields."""
    written: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise click.UsageError("a field must be written NAME=VALUE, and one of the arguments is not")
        if name in written:
            raise click.UsageError(f"field {name!r} is given twice")
        written[name] = value
    if sum(value == "-" for value in written.values()) > 1:
        raise click.UsageError("standard input can be read only once, and several fields use it")
    return {name: value_of(value) for name, value in written.items()}


def filter_of(tests: tuple[str, ...]) -> Filter | None:
    """``state=done | tries>3`` and the like as one filter."""
    filters = [functools.reduce(operator.or_, map(_test_of, _split_alternatives(test))) for test in tests]
    return functools.reduce(operator.and_, filters) if filters else None


def _split_alternatives(text: str) -> list[str]:
    found, at = list[str](), 0
    while at <= len(text):
        match = _ALTERNATIVE.match(text, at)
        assert match is not None
        found.append(match[0])
        at = match.end() + 1
    return found


def _test_of(text: str) -> Filter:
    """One test: a field, or names that lead to a member below it, and a value."""
    match = _TEST.fullmatch(text)
    if match is None:
        raise click.UsageError("--where takes FIELD=VALUE, or != < <= > >= in place of =, and | between several")
    path = match["name"].strip()
    names = _NAME.findall(path)
    if ".".join(names) != path:
        raise click.UsageError("a dot in --where stands between two names: write \\. for one in a name")
    compare: Callable[[Any, Any], Filter] = _COMPARE[match["operator"]]
    return compare(limpet.field(*(_ESCAPED.sub(r"\1", name) for name in names)), literal_of(match["value"].strip()))


_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _read_bounded(stream: IO[bytes], name: str) -> bytes:
    read = stream.read(INPUT_BYTES_MAX + 1)
    if len(read) > INPUT_BYTES_MAX:
        raise InvalidValue(f"{name} has more than {INPUT_BYTES_MAX:,} bytes; a value has at most {VALUE_BYTES_MAX:,}")
    return read


def _decode(raw: bytes, form: str | None, name: str) -> Any:
    if form == "bytes":
        return raw
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{name} is not UTF-8 (byte {error.start}): store it with --bytes") from None
    if form == "text":
        return text
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        # Where the shell removed quotes, an intended object would be stored as a string, and only a later read would
        # show it.
        if text.lstrip()[:1] in ("{", "["):
            raise InvalidValue(
                f"{name} starts like JSON and is not: {error}. Correct it (and its quotes), or store it with --text"
            ) from None
        return text
    except RecursionError:
        raise InvalidValue(f"{name} is nested too deep") from None


# Shell completion -------------------------------------------------------


def complete_key(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Keys with this prefix. Makes no file and shows no error: the shell is waiting for the keys."""
    given = context.find_root().params
    setup = Setup(given.get("url"), given.get("namespace") or "default", as_json=False)
    try:
        with setup.open() as store:
            return store.keys(incomplete, limit=COMPLETIONS_MAX).keys
    except LimpetError:
        return []
