"""``limpet txn``: several guards and writes from a file, all or none."""

from __future__ import annotations

from typing import Any

import click
import msgspec

import limpet
from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup, value_of
from limpet.cli.commands import Command, examples
from limpet.errors import InvalidValue

__all__ = ["txn_command"]


@click.command(
    name="txn",
    cls=Command,
    epilog=examples(
        "limpet txn transfer.json",
        "limpet txn - < transfer.json",
        "limpet txn transfer.json --request-id order-17    # a retry happens once",
    ),
)
@click.argument("file")
@click.option("--request-id", metavar="ID", help="Make the call safe to repeat for ten minutes.")
@pass_setup
def txn_command(setup: Setup, file: str, request_id: str | None) -> None:
    """Do the writes in FILE if its guards hold: all of them or none.

    FILE is a JSON object with writes and guards, in the form of HTTP's batch; - reads it from standard input. An op is
    put, create, add, set, touch, delete or take. If a guard does not hold, nothing is written and the exit code is 4.
    """
    from limpet.server.operations import OPERATIONS
    from limpet.server.requests import Batch, parse, request_of

    members = parse(value_of(file if file == "-" else f"@{file}", "bytes"))
    request = request_of(Batch, members)
    if request_id is not None:
        if request.request_id is not None:
            raise InvalidValue("the request id stands in the file already: give one of them")
        request = msgspec.structs.replace(request, request_id=request_id)

    async def run(store: limpet.Store) -> dict[str, Any]:
        return await OPERATIONS["batch"].run(store, request)

    reply = setup.run(run, make=True)
    if setup.as_json:
        output.show(reply)
        return
    for write, taken in zip(request.writes, reply["taken"], strict=True):
        if write.op == "take":
            output.show_line(output.json_text(taken))
    if output.on_terminal():
        again = " (earlier, by the same request id)" if reply["replayed"] else ""
        output.show_line(f"{len(request.writes)} writes, committed at revision {reply['revision']}{again}")
