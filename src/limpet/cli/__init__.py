"""The command line: parses arguments, calls one verb of the sync API, prints the result.

A command prints its result on standard output and everything else on standard error. The exit code shows the kind of
an error, so that scripts need not read messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import click

import limpet
import limpet.sync
from limpet.cli import output
from limpet.cli.arguments import (
    URL_DEFAULT,
    Setup,
    complete_key,
    duration,
    fields_of,
    filter_of,
    literal_of,
    pass_setup,
    position,
    value_of,
)
from limpet.cli.audit import audit
from limpet.cli.backup import backup_command, epoch_command, restore_command
from limpet.cli.call import call_command
from limpet.cli.commands import Group, LockCommand, Main, condition_options, examples, write_options
from limpet.cli.deadletters import deadletters
from limpet.cli.deleting import del_command
from limpet.cli.demo import demo_command
from limpet.cli.encryption import encryption
from limpet.cli.failure import Missing, quote_name
from limpet.cli.folders import folders_command, namespaces_command
from limpet.cli.grant import grant_command
from limpet.cli.lifetimes import persist_command, take_command, touch_command
from limpet.cli.locks import locks_command
from limpet.cli.migrate import migrate
from limpet.cli.serve import serve_command
from limpet.cli.shell import completion_command, help_command
from limpet.cli.stat import stat_command
from limpet.cli.token import token
from limpet.cli.top import top_command
from limpet.cli.transaction import txn_command
from limpet.cli.writing import expectation, fence_of, show_written
from limpet.errors import Conflict
from limpet.keys import PAGE_MAX
from limpet.model import Event
from limpet.protocol import json as wire

__all__ = ["main"]

_EPILOG = """\b
To start:
  limpet put greeting hello
  limpet get greeting
  limpet ls

\b
To find out:
  limpet locks          who holds which lock?
  limpet history KEY    what changed this key?
  limpet top            which namespace is at work?
  limpet doctor         is the store healthy?

\b
Exit codes:
  0 done             3 not found        6 unavailable, or not healthy
  1 unexpected       4 conflict         7 rejected
  2 usage            5 lock not held    128+n ended by signal n

'limpet COMMAND --help' has examples.
"""


@click.group(cls=Main, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--url",
    envvar="LIMPET_URL",
    metavar="URL",
    help="The URL of the store: sqlite:///FILE, postgresql://…, redis://…, nats://…, or http://… for 'limpet serve'. "
    f"[env: LIMPET_URL; default: {URL_DEFAULT}]",
)
@click.option(
    "-n",
    "--namespace",
    envvar="LIMPET_NAMESPACE",
    default="default",
    metavar="NAME",
    help="The namespace in the store. [env: LIMPET_NAMESPACE; default: default]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line.")
@click.option(
    "--writer",
    envvar="LIMPET_WRITER",
    metavar="NAME",
    help="The name that entries and changes of this command have. [env: LIMPET_WRITER]",
)
@click.version_option(limpet.__version__, prog_name="limpet")
@click.pass_context
def main(context: click.Context, url: str | None, namespace: str, as_json: bool, writer: str | None) -> None:
    """Small state that must not be lost.

    Values are stored under keys, in a namespace of a store. The store is the file limpet.db in this folder unless
    --url or LIMPET_URL names another. The first write makes it; reading never does.
    """
    context.obj = Setup(url, namespace, as_json, writer or None)


# Values -----------------------------------------------------------------------


@main.command(
    epilog=examples(
        "limpet get theme",
        "limpet get logo --raw > logo.png    # a string or bytes as they are",
        "limpet get theme --json             # with version, revision and times",
    )
)
@click.argument("key", shell_complete=complete_key)
@click.option("-r", "--raw", is_flag=True, help="Print a string or bytes exactly, without quotes or newline.")
@pass_setup
def get(setup: Setup, key: str, raw: bool) -> None:
    """Print the value of KEY, as JSON.

    Raw bytes are printed as they are, except to a terminal.
    """
    with setup.open() as store:
        entry = store.entry(key)
    if entry is None:
        raise limpet.errors.NotFound(key)
    if setup.as_json:
        output.show(wire.entry_as_json(entry, with_value=True))
    else:
        output.show_value(entry.value, raw=raw)


@main.command(
    epilog=examples(
        "limpet put theme dark",
        """limpet put config '{"level": 3}' --ttl 1h30m""",
        "limpet put config @config.json --if-version 4",
        "date | limpet put last-run - --text",
    )
)
@click.argument("key", shell_complete=complete_key)
@click.argument("value")
@click.option("--ttl", type=duration, metavar="DURATION", help="Expire after this long: 250ms, 30s, 5m, 1h30m, 7d.")
@click.option("--keep-ttl", is_flag=True, help="Expire when the present value would. [default: never expire]")
@click.option("--if-absent", is_flag=True, help="Only if the key does not exist.")
@condition_options
@click.option("--text", "form", flag_value="text", help="Store a string, whatever VALUE looks like.")
@click.option("--bytes", "form", flag_value="bytes", help="Store raw bytes.")
@write_options
@pass_setup
def put(
    setup: Setup,
    key: str,
    value: str,
    ttl: float | None,
    keep_ttl: bool,
    if_absent: bool,
    if_version: int | None,
    if_revision: int | None,
    form: str | None,
    fenced: bool,
    request_id: str | None,
) -> None:
    """Store VALUE under KEY.

    VALUE is JSON if it parses as such, and a string if not. @FILE takes it from a file, - from standard input.
    """
    if ttl is not None and keep_ttl:
        raise click.UsageError("give one of --ttl and --keep-ttl")
    expect = expectation(if_absent=if_absent, if_version=if_version, if_revision=if_revision)
    content, fence = value_of(value, form), fence_of(fenced)
    with setup.open(make=True) as store:
        entry = store.put(
            key, content, ttl=limpet.KEEP if keep_ttl else ttl, expect=expect, fence=fence, request_id=request_id
        )
    show_written(setup, entry)


@main.command(
    epilog=examples(
        """limpet append event/ '{"kind": "paid"}'    # prints event/0000000000000001""",
        "limpet append event/ @event.json --ttl 7d --request-id order-17",
    )
)
@click.argument("prefix", shell_complete=complete_key)
@click.argument("value")
@click.option("--ttl", type=duration, metavar="DURATION", help="Expire after this long: 250ms, 30s, 5m, 1h30m, 7d.")
@click.option("--text", "form", flag_value="text", help="Store a string, whatever VALUE looks like.")
@click.option("--bytes", "form", flag_value="bytes", help="Store raw bytes.")
@write_options
@pass_setup
def append(
    setup: Setup, prefix: str, value: str, ttl: float | None, form: str | None, fenced: bool, request_id: str | None
) -> None:
    """Store VALUE under a new key, and print the key.

    The key is PREFIX and a number of 16 digits, which grows with each commit. VALUE is read as by 'limpet put'.
    """
    content, fence = value_of(value, form), fence_of(fenced)
    with setup.open(make=True) as store:
        entry = store.append(prefix, content, ttl=ttl, fence=fence, request_id=request_id)
    if setup.as_json:
        show_written(setup, entry)
    else:
        output.show_line(output.visible(entry.key))


@main.command(
    epilog=examples(
        "limpet ls config/",
        "limpet ls --long",
        "limpet ls event/ --reverse --limit 20    # the last twenty",
        "limpet ls job/ --where state=open --where 'tries>=3'",
        "limpet ls --json | jq -r .key       # keys exactly as they are",
    )
)
@click.argument("prefix", default="", shell_complete=complete_key)
@click.option("-l", "--long", is_flag=True, help="Print version, revision, size, time to live, writer, and key.")
@click.option("--values", is_flag=True, help="Print the value beside the key; with --json, in the document.")
@click.option(
    "--where", multiple=True, metavar="FIELD=VALUE", help="Only where a field matches: = != < <= > >=. May be repeated."
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most this many.")
@click.option("--after", metavar="KEY", help="Only the keys after this one, in the order of the list.")
@click.option("-r", "--reverse", is_flag=True, help="The last keys first.")
@pass_setup
def ls(
    setup: Setup,
    prefix: str,
    long: bool,
    values: bool,
    where: tuple[str, ...],
    limit: int | None,
    after: str | None,
    reverse: bool,
) -> None:
    """List keys in order: all, or those that start with PREFIX.

    --where compares fields of records and members of JSON objects. Characters that would break a line are escaped, as
    in JSON.
    """
    if long and values:
        raise click.UsageError("give one of --long and --values")
    wanted, is_empty = filter_of(where), True
    with setup.open() as store:
        if not (long or values or wanted or setup.as_json):
            # Only keys are printed, so no values are read.
            for key in _keys(store, prefix, limit, after, reverse):
                is_empty = False
                output.show_line(output.visible(key))
        else:
            now_ms = store.status().now_ms
            for entry in store.scan(prefix, where=wanted, limit=limit, after=after, reverse=reverse):
                if is_empty and long and not setup.as_json:
                    output.show_heading(output.ENTRY_COLUMNS)
                is_empty = False
                if setup.as_json:
                    output.show(wire.entry_as_json(entry, with_value=values))
                elif long:
                    output.show_columns(output.ENTRY_COLUMNS, output.entry_cells(entry, now_ms))
                else:
                    beside = f"\t{output.json_text(entry.value)}" if values else ""
                    output.show_line(output.visible(entry.key) + beside)
    if is_empty:
        output.show_note(f"nothing to list in {setup.place}")


@main.command(
    epilog=examples(
        "limpet incr visits",
        "limpet incr stock -3",
        "limpet incr mails-sent --request-id order-17    # a retry counts once",
        "limpet incr attempts/ada --ttl-if-new 1m    # counts within a minute",
        "limpet incr high-water 17 --maximum         # keeps the larger number",
    )
)
@click.argument("key", shell_complete=complete_key)
@click.argument("by", type=int, default=1)
@click.option("--ttl", type=duration, metavar="DURATION", help="Expire after this long. [default: as before]")
@click.option("--ttl-if-new", type=duration, metavar="DURATION", help="Expire after this long, if it is a new counter.")
@click.option("--minimum", "rule", flag_value="minimum", help="Keep the smaller of BY and the number there.")
@click.option("--maximum", "rule", flag_value="maximum", help="Keep the larger of BY and the number there.")
@write_options
@pass_setup
def incr(
    setup: Setup,
    key: str,
    by: int,
    ttl: float | None,
    ttl_if_new: float | None,
    rule: str | None,
    fenced: bool,
    request_id: str | None,
) -> None:
    """Add BY, or 1, to the counter KEY, and print it.

    A counter that does not exist starts at zero; with --minimum or --maximum, at BY.
    """
    if ttl is not None and ttl_if_new is not None:
        raise click.UsageError("give one of --ttl and --ttl-if-new")
    fence, kept = fence_of(fenced), limpet.KEEP if ttl is None else ttl
    with setup.open(make=True) as store:
        number = getattr(store, rule or "add")(
            key, by, ttl=kept, ttl_if_new=ttl_if_new, fence=fence, request_id=request_id
        )
    if setup.as_json:
        output.show({"key": key, "value": number})
    else:
        output.show_line(str(number))


# Records ----------------------------------------------------------------------


@main.group(
    cls=Group,
    epilog=examples(
        "limpet field set job/7 state=pending tries=0",
        "limpet field swap job/7 state pending running --set worker=w1",
        "limpet field get job/7 worker",
    ),
)
def field() -> None:
    """Read and write single fields of a record."""


@field.command(name="get", epilog=examples("limpet field get job/7", "limpet field get job/7 state --raw"))
@click.argument("key", shell_complete=complete_key)
@click.argument("name", required=False)
@click.option("-r", "--raw", is_flag=True, help="Print a string or bytes exactly, without quotes or newline.")
@pass_setup
def field_get(setup: Setup, key: str, name: str | None, raw: bool) -> None:
    """Print field NAME of the record KEY, or all fields, as JSON."""
    with setup.open() as store:
        entry = store.record(key).entry()
    if entry is None:
        raise limpet.errors.NotFound(key)
    fields = entry.value
    if name is not None and name not in fields:
        raise Missing(
            f"record {quote_name(key)} has no field {quote_name(name)}, in {setup.place}",
            "'limpet field get KEY' shows the fields it has.",
            key=key,
        )
    if setup.as_json:
        chosen = fields if name is None else limpet.Fields({name: fields[name]})
        output.show({**wire.entry_as_json(entry, with_value=False), "fields": wire.plain(chosen)})
    else:
        output.show_value(fields if name is None else fields[name], raw=raw)


@field.command(
    name="set",
    epilog=examples(
        "limpet field set job/7 state=done tries=3",
        "limpet field set job/7 --unset worker",
        "limpet field set job/7 log=@run.log --if-exists",
    ),
)
@click.argument("key", shell_complete=complete_key)
@click.argument("assignments", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--unset", multiple=True, metavar="NAME", help="Clear this field. May be repeated.")
@click.option("--if-exists", is_flag=True, help="Only if the record exists.")
@write_options
@pass_setup
def field_set(
    setup: Setup,
    key: str,
    assignments: tuple[str, ...],
    unset: tuple[str, ...],
    if_exists: bool,
    fenced: bool,
    request_id: str | None,
) -> None:
    """Set fields of the record KEY, leaving the others as they are.

    The record is made if it does not exist. A VALUE is written as for put.
    """
    if not assignments and not unset:
        raise click.UsageError("give at least one NAME=VALUE or --unset NAME")
    fields, fence = fields_of(assignments), fence_of(fenced)
    with setup.open(make=not if_exists) as store:
        entry = store.record(key).set(fields, unset=unset, if_exists=if_exists, fence=fence, request_id=request_id)
    show_written(setup, entry)


@field.command(
    name="swap",
    epilog=examples(
        "limpet field swap job/7 state pending running",
        "limpet field swap job/7 state pending running --set worker=w1 --ttl 5m",
    ),
)
@click.argument("key", shell_complete=complete_key)
@click.argument("name")
@click.argument("expected")
@click.argument("new")
@click.option("--set", "also", multiple=True, metavar="NAME=VALUE", help="Set this field with it. May be repeated.")
@click.option("--ttl", type=duration, metavar="DURATION", help="Expire after this long. [default: as before]")
@write_options
@pass_setup
def field_swap(
    setup: Setup,
    key: str,
    name: str,
    expected: str,
    new: str,
    also: tuple[str, ...],
    ttl: float | None,
    fenced: bool,
    request_id: str | None,
) -> None:
    """Set field NAME of the record KEY to NEW if it is EXPECTED.

    Of several processes that try at once, one wins. The others exit with 4, and have changed nothing.
    """
    before, after, together, fence = literal_of(expected), value_of(new), fields_of(also), fence_of(fenced)
    with setup.open() as store:
        record = store.record(key)
        won = record.swap(
            name,
            before,
            after,
            set=together,
            ttl=limpet.KEEP if ttl is None else ttl,
            fence=fence,
            request_id=request_id,
        )
        entry = record.entry()
    if not won:
        raise Conflict(key, expected=f"a certain value in field {name!r}", current=entry)
    if entry is not None:
        show_written(setup, entry)


# The log ----------------------------------------------------------------------


@main.command(
    epilog=examples(
        "limpet watch",
        "limpet watch 'config/*' --initial",
        "limpet watch theme --count 1 && ./restart.sh",
        "limpet watch --json --after POSITION >> changes.jsonl",
    )
)
@click.argument("pattern", default="*", shell_complete=complete_key)
@click.option("--initial", is_flag=True, help="Print the present entries first, then a line 'synced', then changes.")
@click.option(
    "--after", type=position, metavar="POSITION", help="Continue after the position of an event, or after a revision."
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after this many lines.")
@pass_setup
def watch(setup: Setup, pattern: str, initial: bool, after: str | int | None, count: int | None) -> None:
    """Print changes as they happen.

    PATTERN is * for all keys, 'config/*' for those with a prefix (in quotes, or the shell may expand the *), and
    otherwise one key. Each line has revision, time, operation, version, writer, key and value. Ctrl-C ends it.
    """
    if initial and after is not None:
        raise click.UsageError("give one of --initial and --after")
    with setup.open(sweep=True) as store, store.watch(pattern, initial=initial, after=after) as events:
        if not setup.as_json:
            output.show_heading(output.EVENT_COLUMNS)
        for number, event in enumerate(events, 1):
            _show_event(setup, event)
            output.flush()
            if number == count:
                return


@main.command(epilog=examples("limpet history theme", "limpet history theme --json | jq -r .cause"))
@click.argument("key", shell_complete=complete_key)
@pass_setup
def history(setup: Setup, key: str) -> None:
    """Print what changed KEY, oldest first.

    Each line has revision, time, operation, version, writer, key and value. The log
    reaches back 24 hours, 100,000 changes or 256 MB.
    """
    with setup.open() as store:
        floor, number = store.status().floor, 0
        for number, event in enumerate(store.history(key), 1):
            if number == 1 and not setup.as_json:
                output.show_heading(output.EVENT_COLUMNS)
            _show_event(setup, event)
    if number == 0:
        since = f", which begins after revision {floor}" if floor else ""
        raise Missing(
            f"no change of {quote_name(key)} is in the log of {setup.place}{since}",
            "'limpet get KEY' shows whether the key exists.",
            key=key,
        )


# Locks ------------------------------------------------------------------------


@main.command(
    cls=LockCommand,
    epilog=examples(
        "limpet lock nightly -- ./report.sh",
        "limpet lock deploy --wait 10m --holder alice -- make deploy",
        "limpet lock nightly -- sh -c 'limpet put report @out.json --fenced'",
    ),
)
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--ttl",
    type=duration,
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="How long it lasts without renewal.",
)
@click.option("--wait", type=duration, default="0s", show_default=True, metavar="DURATION", help="How long to wait.")
@click.option("--holder", metavar="WHO", help="The name of the holder to show. [default: the host and the process]")
@pass_setup
def lock(setup: Setup, name: str, command: tuple[str, ...], ttl: float, wait: float, holder: str | None) -> None:
    """Run COMMAND while holding the lock NAME, and exit as it did.

    Exits with 5 if another process holds the lock, and also if the lock was lost: then COMMAND is ended. While it runs,
    the lock is renewed, and signals are forwarded to COMMAND.

    The environment of COMMAND holds LIMPET_LOCK and LIMPET_FENCING_TOKEN, and LIMPET_URL and LIMPET_NAMESPACE for the
    store. A 'limpet put --fenced' in COMMAND is refused once the lock is lost.
    """
    from limpet.cli.running import NOT_FOUND, NOT_RUN, SignalForwarder, run_while_held

    with (
        SignalForwarder() as signals,
        setup.open(make=True, sweep=True) as store,
        store.lock(name, ttl=ttl, wait=wait, holder=holder) as held,
    ):
        environment = {
            **os.environ,
            "LIMPET_URL": setup.absolute_url,
            "LIMPET_NAMESPACE": setup.namespace,
            "LIMPET_LOCK": name,
            "LIMPET_FENCING_TOKEN": str(held.token),
        }
        try:
            code = run_while_held(signals, command, environment, held)
        except OSError as error:
            output.show_stderr(f"limpet: cannot run {quote_name(command[0])}: {error.strerror}")
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN
    sys.exit(code)


# Maintenance -------------------------------------------------------------------------


@main.command(epilog=examples("limpet doctor", "limpet doctor --json | jq -r 'select(.level != \"ok\")'"))
@pass_setup
def doctor(setup: Setup) -> None:
    """Check that the store is healthy, and show what is not.

    Each line has a level, the name of the check and what it found. The level is ok, warn (needs attention) or bad
    (needs action). The exit code is 6 if something is bad. A store that does not exist is not made, and a file of
    another program is not changed.
    """
    from limpet.cli.health import examine

    is_healthy = True
    for found in examine(setup):
        is_healthy = is_healthy and found.level != "bad"
        if setup.as_json:
            output.show(found._asdict())
        else:
            output.show_line(f"{found.level:<5} {found.check:<11} {found.finding}")
            if found.advice is not None:
                output.show_line(f"{'':<17} {found.advice}")
        output.flush()
    if not is_healthy:
        sys.exit(6)


@main.command(
    epilog=examples("limpet index", "limpet index updated_at", "limpet -n gbe index updated_at --drop"),
)
@click.argument("field", required=False)
@click.option("--drop", is_flag=True, help="Drop the index of the field.")
@pass_setup
def index(setup: Setup, field: str | None, drop: bool) -> None:
    """Keep an index of a field, or list the fields that have one.

    A scan that filters by such a field reads only the entries that match. Results stay the same; each write costs a
    little more. Making an index reads the whole namespace once.
    """
    if drop and field is None:
        raise click.UsageError("name the index to drop: limpet index FIELD --drop")
    with setup.open() as store:
        if field is None:
            fields = store.indexes()
            for name in fields:
                if setup.as_json:
                    output.show({"field": name})
                else:
                    output.show_line(output.visible(name))
            if not fields and not setup.as_json:
                output.show_stderr("no field has an index")
        elif drop:
            store.unindex(field)
        elif not store.index(field):
            output.show_stderr(f"{store.traits.engine} keeps no indexes: its scans read every entry of their prefix")


main.add_command(del_command)
main.add_command(take_command)
main.add_command(touch_command)
main.add_command(persist_command)
main.add_command(txn_command)
main.add_command(locks_command)
main.add_command(stat_command)
main.add_command(top_command)
main.add_command(demo_command)
main.add_command(completion_command)
main.add_command(help_command)
main.add_command(folders_command)
main.add_command(namespaces_command)
main.add_command(encryption)
main.add_command(grant_command)
main.add_command(token)
main.add_command(migrate)
main.add_command(backup_command)
main.add_command(restore_command)
main.add_command(epoch_command)
main.add_command(call_command)
main.add_command(serve_command)
main.add_command(audit)
main.add_command(deadletters)


# Inside -----------------------------------------------------------------------


def _keys(store: limpet.sync.Store, prefix: str, limit: int | None, after: str | None, reverse: bool) -> Iterator[str]:
    """Keys, page by page."""
    left = limit
    while left != 0:
        count = PAGE_MAX if left is None else min(left, PAGE_MAX)
        page = store.keys(prefix, limit=count, after=after, reverse=reverse)
        yield from page.keys
        if not page.truncated:
            return
        left = None if left is None else left - page.count
        after = page.cursor


def _show_event(setup: Setup, event: Event) -> None:
    if setup.as_json:
        output.show(wire.event_as_json(event))
    else:
        output.show_columns(output.EVENT_COLUMNS, output.event_cells(event))
