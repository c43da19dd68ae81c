"""``limpet del``: deletes one key, several, or all that start with a prefix."""

from __future__ import annotations

from collections.abc import Iterable

import click

import limpet.sync
from limpet.cli import output
from limpet.cli.arguments import Setup, complete_key, pass_setup
from limpet.cli.commands import Command, condition_options, examples, write_options
from limpet.cli.failure import Missing, quote_name
from limpet.cli.writing import expectation, fence_of
from limpet.draft import Fence
from limpet.errors import NotFound
from limpet.keys import BATCH_WRITES_MAX, PAGE_MAX

__all__ = ["del_command"]


@click.command(
    name="del",
    cls=Command,
    epilog=examples(
        "limpet del session/42 session/43",
        "limpet del theme --if-version 3",
        "limpet del session/ --prefix --dry-run    # only shows what it would delete",
        "limpet del session/ --prefix",
    ),
)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...", shell_complete=complete_key)
@click.option("--prefix", "is_prefix", is_flag=True, help="Delete all keys that start with KEY, and print how many.")
@click.option("--dry-run", is_flag=True, help="Print the keys that would be deleted, and delete nothing.")
@condition_options
@write_options
@pass_setup
def del_command(
    setup: Setup,
    keys: tuple[str, ...],
    is_prefix: bool,
    dry_run: bool,
    if_version: int | None,
    if_revision: int | None,
    fenced: bool,
    request_id: str | None,
) -> None:
    """Delete KEY, or several.

    Several keys are deleted in batches of 128, each batch as a whole; so are those of --prefix. If it is interrupted,
    run it again. If a key does not exist, the others are deleted, and the exit code is 3.
    """
    fence = fence_of(fenced)
    if (is_prefix or len(keys) > 1) and (if_version, if_revision, request_id) != (None, None, None):
        raise click.UsageError("--if-version, --if-revision and --request-id go with one KEY, and not with --prefix")
    with setup.open() as store:
        if dry_run:
            _show_found(setup, store, keys, is_prefix)
        elif is_prefix:
            _delete_prefixes(setup, store, keys, fence)
        elif len(keys) > 1:
            _delete_several(setup, store, list(dict.fromkeys(keys)), fence)
        else:
            expect = expectation(if_version=if_version, if_revision=if_revision)
            if not store.delete(keys[0], expect=expect, fence=fence, request_id=request_id):
                raise NotFound(keys[0])
            _show_deleted(setup, keys)


def _show_found(setup: Setup, store: limpet.sync.Store, keys: Iterable[str], is_prefix: bool) -> None:
    for key in keys:
        if is_prefix:
            _show_keys(setup, store, key)
        elif store.entry(key) is not None:
            _show_key(setup, key)


def _show_keys(setup: Setup, store: limpet.sync.Store, prefix: str) -> None:
    page = store.keys(prefix, limit=PAGE_MAX)
    while True:
        for key in page.keys:
            _show_key(setup, key)
        if not page.truncated:
            return
        page = store.keys(prefix, limit=PAGE_MAX, after=page.cursor)


def _show_key(setup: Setup, key: str) -> None:
    if setup.as_json:
        output.show({"key": key, "deleted": False})
    else:
        output.show_line(output.visible(key))


def _delete_prefixes(setup: Setup, store: limpet.sync.Store, prefixes: Iterable[str], fence: Fence | None) -> None:
    for prefix in prefixes:
        deleted = store.delete_prefix(prefix, fence=fence)
        if setup.as_json:
            output.show({"prefix": prefix, "deleted": deleted})
        else:
            output.show_line(str(deleted))


def _delete_several(setup: Setup, store: limpet.sync.Store, keys: list[str], fence: Fence | None) -> None:
    missing: list[str] = []
    for first in range(0, len(keys), BATCH_WRITES_MAX):
        batch, some = store.batch(), keys[first : first + BATCH_WRITES_MAX]
        for key in some:
            batch.delete(key)
        if fence is not None:
            batch.fence(fence)
        ended = batch.commit().ended
        missing += [key for key, entry in zip(some, ended, strict=True) if entry is None]
        _show_deleted(setup, [key for key, entry in zip(some, ended, strict=True) if entry is not None])
    if missing:
        some_more = f", and {len(missing) - 1:,} more keys" if len(missing) > 1 else ""
        raise Missing(
            f"key {quote_name(missing[0])}{some_more} not found in {setup.place}",
            "The other keys were deleted. 'limpet ls' lists the keys; -n chooses another namespace.",
            key=missing[0],
        )


def _show_deleted(setup: Setup, keys: Iterable[str]) -> None:
    if setup.as_json:
        for key in keys:
            output.show({"key": key, "deleted": True})
