"""``limpet call``: runs any operation of a server, on the store itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import limpet
from limpet.cli import output
from limpet.cli.arguments import Setup, pass_setup, value_of
from limpet.cli.audit import semantic_store
from limpet.cli.commands import Command, examples
from limpet.errors import InvalidValue

if TYPE_CHECKING:
    from limpet.server.operations import Operation


def _names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from limpet.server.operations import OPERATIONS

    return [name for name in OPERATIONS if name.startswith(incomplete)]


@click.command(
    name="call",
    cls=Command,
    epilog=examples(
        """limpet call take '{"key": "token"}'""",
        """limpet call touch '{"key": "session/42", "ttl": 60}'""",
        """limpet call batch '{"writes": [{"op": "add", "key": "visits"}]}'""",
        "limpet call scan @query.json",
    ),
)
@click.argument("operation", shell_complete=_names)
@click.argument("request", default="{}")
@pass_setup
def call_command(setup: Setup, operation: str, request: str) -> None:
    """Run OPERATION with REQUEST, as a server would.

    The operations and their requests are those of HTTP's /call and of the NATS subjects. REQUEST is a JSON object;
    @FILE reads it from a file, - from standard input. The reply is a JSON object.
    """
    from limpet.server.operations import OPERATIONS
    from limpet.server.requests import parse, request_of

    if operation not in OPERATIONS or operation == "watch":
        known = ", ".join(name for name in OPERATIONS if name != "watch")
        raise InvalidValue(f"there is no operation of that name to call; known: {known}")
    row = OPERATIONS[operation]
    parsed = request_of(row.request, parse(value_of(request, "bytes")))
    output.show(setup.run(lambda store: _run(row, store, parsed), make=row.right_for(parsed) != "read"))


async def _run(row: Operation, store: limpet.Store, request: Any) -> dict[str, Any]:
    if not row.is_semantic:
        return await row.run(store, request)
    return await row.run(await semantic_store(store, writes=row.right == "write"), request)
