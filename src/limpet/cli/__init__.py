"""The command line: parses, calls one verb of the blocking face, prints.

A command prints its answer on standard output and everything else on standard error. What went
wrong is told by the exit code as well, so that scripts need not read messages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

import limpet
import limpet.sync
from limpet import errors
from limpet.cli import output
from limpet.cli.arguments import DURATION, Setup, filter_of, pass_setup, value_of
from limpet.model import Entry

EXIT_CODES: Final[dict[type[errors.LimpetError], int]] = {
    errors.NotFound: 3,
    errors.Conflict: 4,
    errors.LockHeld: 5,
    errors.LockNotHeld: 5,
    errors.LockExpired: 5,
    errors.LockLost: 5,
    errors.TransientError: 6,
    errors.Ambiguous: 6,
    errors.RequestError: 7,
    errors.StateError: 7,
    errors.BrokenError: 6,
}
"""By cause. The first class that fits decides, so leaves stand before their groups."""

TERMINATE_GRACE_S: Final = 10.0

_EPILOG: Final = """
\b
Exit codes:
  0 done             3 not found        6 unavailable
  1 unexpected       4 conflict         7 rejected
  2 usage            5 lock not held    130 interrupted
"""


class _Group(click.Group):
    """Turns our errors into exit codes, in one place."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except errors.LimpetError as error:
            setup = context.find_object(Setup)
            output.show_error(error, as_json=setup is not None and setup.as_json)
            sys.exit(next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind)))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


@click.group(cls=_Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", envvar="LIMPET_URL", help="The engine. Default: $LIMPET_URL, else ./limpet.db.")
@click.option("-n", "--namespace", envvar="LIMPET_NAMESPACE", default="default", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line.")
@click.version_option(limpet.__version__, prog_name="limpet")
@click.pass_context
def main(context: click.Context, url: str | None, namespace: str, as_json: bool) -> None:
    r"""Small state that must not be lost.

    \b
    limpet put greeting '"hello"'
    limpet get greeting
    """
    context.obj = Setup(url, namespace, as_json)


@main.command()
@click.argument("key")
@click.option("-r", "--raw", is_flag=True, help="Print a string or bytes as they are, without quotes or newline.")
@pass_setup
def get(setup: Setup, key: str, raw: bool) -> None:
    """Print the value of KEY."""
    with setup.open() as store:
        entry = _found(store.entry(key), key)
    if setup.as_json:
        output.show(output.entry_as_json(entry))
    elif raw:
        output.show_raw(entry.value)
    else:
        output.show_value(entry.value)


@main.command()
@click.argument("key")
@click.argument("value")
@click.option("--ttl", type=DURATION, help="Expire after this long: 30s, 5m, 24h, 7d.")
@click.option("--if-absent", is_flag=True, help="Only if there is no such key.")
@click.option("--if-version", type=int, metavar="N", help="Only if the key is at this version.")
@click.option("--if-revision", type=int, metavar="N", help="Only if the key is at this revision.")
@click.option("--text", "form", flag_value="text", help="Store VALUE as a string, whatever it looks like.")
@click.option("--bytes", "form", flag_value="bytes", help="Store VALUE as raw bytes.")
@click.option("--request-id", help="Make the call safe to repeat for ten minutes.")
@pass_setup
def put(
    setup: Setup,
    key: str,
    value: str,
    ttl: float | None,
    if_absent: bool,
    if_version: int | None,
    if_revision: int | None,
    form: str | None,
    request_id: str | None,
) -> None:
    """Store VALUE under KEY.

    VALUE is JSON if it parses as such and a string if not; @FILE reads a file, - standard input.
    """
    expect = _expectation(if_absent, if_version, if_revision)
    with setup.open() as store:
        entry = store.put(key, value_of(value, form), ttl=ttl, expect=expect, request_id=request_id)
    _show_entry(setup, entry)


@main.command(name="del")
@click.argument("key")
@click.option("--if-version", type=int, metavar="N", help="Only if the key is at this version.")
@click.option("--if-revision", type=int, metavar="N", help="Only if the key is at this revision.")
@pass_setup
def delete(setup: Setup, key: str, if_version: int | None, if_revision: int | None) -> None:
    """Delete KEY."""
    with setup.open() as store:
        if not store.delete(key, expect=_expectation(False, if_version, if_revision)):
            raise errors.NotFound(key)
    if setup.as_json:
        output.show({"key": key, "deleted": True})


@main.command()
@click.argument("prefix", default="")
@click.option("-l", "--long", is_flag=True, help="Version, revision, size, time to live and key.")
@click.option(
    "--where", multiple=True, metavar="FIELD=VALUE", help="Only where a field fits: = != < <= > >=. Repeatable."
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most so many.")
@click.option("--after", metavar="KEY", help="Only what follows this key.")
@pass_setup
def ls(setup: Setup, prefix: str, long: bool, where: tuple[str, ...], limit: int | None, after: str | None) -> None:
    """List keys, those that start with PREFIX if given."""
    with setup.open() as store:
        now_ms = store.status().now_ms
        for entry in store.scan(prefix, where=filter_of(where), limit=limit, after=after):
            if setup.as_json:
                output.show(output.entry_as_json(entry, with_value=long))
            elif long:
                output.show_columns(output.entry_columns(entry, now_ms))
            else:
                click.echo(entry.key)


@main.command()
@click.argument("pattern", default="*")
@click.option("--initial", is_flag=True, help="Start with what there is.")
@click.option("--after", metavar="POSITION", help="Resume after the position of an event.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after so many events.")
@pass_setup
def watch(setup: Setup, pattern: str, initial: bool, after: str | None, count: int | None) -> None:
    """Print changes as they happen: all, those under 'PREFIX*', or those of one key."""
    with setup.open() as store, store.watch(pattern, initial=initial, after=after) as events:
        for number, event in enumerate(events, 1):
            if setup.as_json:
                output.show(output.event_as_json(event))
            else:
                output.show_columns(output.event_columns(event))
            if number == count:
                return


@main.command()
@click.argument("key")
@click.argument("by", type=int, default=1)
@pass_setup
def incr(setup: Setup, key: str, by: int) -> None:
    """Add BY, 1 if not given, to the counter KEY and print it."""
    with setup.open() as store:
        number = store.add(key, by)
    output.show({"key": key, "value": number}) if setup.as_json else click.echo(number)


@main.group()
def field() -> None:
    """Read and write single fields of a record."""


@field.command(name="get")
@click.argument("key")
@click.argument("name", required=False)
@pass_setup
def field_get(setup: Setup, key: str, name: str | None) -> None:
    """Print field NAME of the record KEY, or all fields."""
    with setup.open() as store:
        fields = store.record(key).fields()
    if fields is None:
        raise errors.NotFound(key)
    if name is not None and name not in fields:
        raise errors.NotFound(f"{key} field {name}")
    output.show_value(fields if name is None else fields[name])


@field.command(name="set")
@click.argument("key")
@click.argument("assignments", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("--unset", multiple=True, metavar="NAME", help="Clear this field. Repeatable.")
@click.option("--if-exists", is_flag=True, help="Only if there is such a record.")
@pass_setup
def field_set(setup: Setup, key: str, assignments: tuple[str, ...], unset: tuple[str, ...], if_exists: bool) -> None:
    """Set fields of the record KEY, leaving the others."""
    with setup.open() as store:
        _show_entry(setup, store.record(key).set(_fields(assignments), unset=unset, if_exists=if_exists))


@field.command(name="swap")
@click.argument("key")
@click.argument("name")
@click.argument("expected")
@click.argument("new")
@click.option("--set", "also", multiple=True, metavar="NAME=VALUE", help="Set this with it. Repeatable.")
@pass_setup
def field_swap(setup: Setup, key: str, name: str, expected: str, new: str, also: tuple[str, ...]) -> None:
    """Set field NAME to NEW if it is EXPECTED. Of all who try, one wins; the others exit with 4."""
    with setup.open() as store:
        record = store.record(key)
        if not record.swap(name, value_of(expected), value_of(new), set=_fields(also)):
            raise errors.Conflict(key, expected=f"a certain value in field {name!r}", current=record.entry())
        entry = record.entry()
    if entry is not None:
        _show_entry(setup, entry)


@main.command()
@click.argument("key")
@pass_setup
def history(setup: Setup, key: str) -> None:
    """Print the changes of KEY that are still in the log, oldest first."""
    with setup.open() as store:
        for event in store.history(key):
            if setup.as_json:
                output.show(output.event_as_json(event))
            else:
                output.show_columns(output.event_columns(event))


@main.command()
@pass_setup
def stat(setup: Setup) -> None:
    """Print what the namespace holds, and who holds its locks."""
    with setup.open() as store:
        status, traits, locks = store.status(), store.traits, store.locks()
    facts = {"engine": traits.engine, "durability": traits.durability, **output.status_as_json(status)}
    held = [
        {"name": lock.name, "holder": lock.holder, "token": lock.token, "remaining": lock.remaining} for lock in locks
    ]
    if setup.as_json:
        output.show({**facts, "locks": held})
        return
    for name, fact in facts.items():
        click.echo(f"{name:<12} {fact}")
    for lock in locks:
        click.echo(
            f"{'lock':<12} {lock.name} held by {lock.holder} for {lock.remaining:.1f} s more (token {lock.token})"
        )


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--ttl", type=DURATION, default=30.0, help="How long the lease lasts without renewal. Default: 30s.")
@click.option("--wait", type=DURATION, default=0.0, help="How long to wait for the lock. Default: not at all.")
@click.option("--holder", help="Who is shown as the holder. Default: the host and process.")
@pass_setup
def lock(setup: Setup, name: str, command: tuple[str, ...], ttl: float, wait: float, holder: str | None) -> None:
    r"""Run COMMAND while holding the lock NAME, and exit as it did.

    \b
    limpet lock nightly -- ./report.sh

    COMMAND finds its fencing token in LIMPET_FENCING_TOKEN. When the lock is lost, COMMAND is ended
    and the exit code is 5.
    """
    with setup.open() as store, store.lock(name, ttl=ttl, wait=wait, holder=holder) as held:
        environment = {**os.environ, "LIMPET_LOCK": name, "LIMPET_FENCING_TOKEN": str(held.token)}
        code = _run_while(command, environment, lambda: not held.lost)
    sys.exit(code)


@main.command()
@pass_setup
def doctor(setup: Setup) -> None:
    """Try the engine and say what is well and what is not."""
    healthy = True
    for is_well, finding in _findings(setup):
        healthy = healthy and is_well
        if setup.as_json:
            output.show({"well": is_well, "finding": finding})
        else:
            click.echo(f"{'ok  ' if is_well else 'BAD '} {finding}")
    if not healthy:
        sys.exit(6)


def _findings(setup: Setup) -> Iterator[tuple[bool, str]]:
    began = time.perf_counter()
    try:
        with setup.open() as store:
            yield True, f"opened {setup.shown_url} in {(time.perf_counter() - began) * 1000:.0f} ms"
            traits, status = store.traits, store.status()
            survives = {
                "none": "nothing: it ends with the process",
                "process": "a killed process, but not a power cut",
                "disk": "a power cut",
                "quorum": "a lost machine",
            }[traits.durability]
            yield traits.durability != "none", f"an acknowledged write survives {survives}"
            skew_s = abs(status.now_ms / 1000 - time.time())
            yield skew_s < 1, f"the engine's clock and this host's differ by {skew_s:.3f} s"
            yield True, f"namespace {store.name!r} is at revision {status.revision} with {status.keys} keys"
    except errors.LimpetError as error:
        yield False, f"{setup.shown_url}: {error}"


@contextmanager
def _forwarding_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, _: object) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_while(command: tuple[str, ...], environment: dict[str, str], is_held: Callable[[], bool]) -> int:
    """Run a command until it ends, or end it when it may no longer run."""
    try:
        child = subprocess.Popen(command, env=environment)
    except OSError as error:
        click.echo(f"limpet: cannot run {command[0]}: {error.strerror}", err=True)
        return 127
    with _forwarding_signals(child):
        while True:
            try:
                code = child.wait(timeout=0.1)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                if not is_held():
                    break
        child.terminate()
        try:
            child.wait(timeout=TERMINATE_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return EXIT_CODES[errors.LockLost]


def _found(entry: Entry | None, key: str) -> Entry:
    if entry is None:
        raise errors.NotFound(key)
    return entry


def _expectation(if_absent: bool, if_version: int | None, if_revision: int | None) -> Any:
    given = [if_absent or None, if_version, if_revision]
    if sum(item is not None for item in given) > 1:
        raise click.UsageError("give one condition: --if-absent, --if-version or --if-revision")
    if if_absent:
        return limpet.ABSENT
    if if_version is not None:
        return limpet.Version(if_version)
    return limpet.ANY if if_revision is None else limpet.Revision(if_revision)


def _fields(assignments: tuple[str, ...]) -> dict[str, Any]:
    fields = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise click.UsageError(f"{assignment!r} is not NAME=VALUE")
        fields[name] = value_of(value)
    return fields


def _show_entry(setup: Setup, entry: Entry) -> None:
    """What a write left: nothing to read for people, version and revision for programs."""
    if setup.as_json:
        output.show(output.entry_as_json(entry, with_value=False))
    elif sys.stdout.isatty():
        click.echo(f"version {entry.version} at revision {entry.revision}")
