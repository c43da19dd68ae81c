"""Isolation on NATS: permissions by which nats-server itself keeps plugins apart.

A plugin is a user that may publish to its own subjects and subscribe to its own inbox, and nothing else. So it can
neither send a request in the name of another plugin nor receive another's replies. The Limpet server is a user too. It
receives every request, and may publish only to the inboxes of these plugins and of operators. So no plugin can use the
reply subject of its request to make the server send a request for it.

This module only makes text: a block for the configuration of nats-server. Passwords come from its environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from limpet.errors import InvalidValue
from limpet.keys import check_namespace

__all__ = ["grant_config", "inbox_prefix", "password_variable"]

SERVERS: Final = "_LIMPET.>"
OPERATORS: Final = "_INBOX.>"

_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\Z")


def grant_config(plugins: Sequence[str], *, prefix: str = "db.kv", server: str = "limpet") -> str:
    """The authorization block for these plugins and the user of the Limpet server.

    Raises:
        InvalidNamespace: A name that no plugin can have.
        InvalidValue: A prefix that no subject can have, or a plugin with the name of the server's user.
    """
    names = [check_namespace(name) for name in sorted({*plugins})]
    if not _PREFIX.match(prefix):
        raise InvalidValue("a prefix is words of letters, digits, '_' and '-', joined by dots, such as db.kv")
    if check_namespace(server) in names:
        raise InvalidValue(f"{server!r} is the user of the Limpet server: give that another name with --server")
    inboxes = [f"{inbox_prefix(name)}.>" for name in names]
    users = [
        _user(
            server,
            # Replies and heartbeats of watches go to inboxes. Servers end each other's watches.
            publish=[*inboxes, OPERATORS, SERVERS],
            subscribe=[f"{prefix}.>", "$SRV.>", OPERATORS, SERVERS],
        ),
        *(_user(name, publish=[f"{prefix}.{name}.*"], subscribe=[f"{inbox_prefix(name)}.>"]) for name in names),
    ]
    return "authorization {\n  users: [\n" + "".join(users) + "  ]\n}\n"


def inbox_prefix(plugin: str) -> str:
    """The prefix of a plugin's inboxes, which the plugin passes to its driver as ``inbox_prefix``."""
    return f"_INBOX_{plugin}"


def password_variable(user: str) -> str:
    """The environment variable of nats-server that holds a user's password."""
    return f"{user.upper().replace('-', '_')}_PASSWORD"


def _user(name: str, *, publish: Sequence[str], subscribe: Sequence[str]) -> str:
    return (
        f"    {{\n      user: {json.dumps(name)}, password: ${password_variable(name)}\n"
        "      permissions: {\n"
        f"        publish: {{ allow: {json.dumps([*publish])} }}\n"
        f"        subscribe: {{ allow: {json.dumps([*subscribe])} }}\n"
        "      }\n    }\n"
    )
