"""Walls on NATS: the permissions by which the server itself keeps plugins apart.

A plugin is a user that may publish to its own subjects and listen to its own inbox, and nothing else: it can neither
ask for another plugin nor hear the answers that another gets. The server of Limpet is a user too. It hears every
request, and may answer to the inboxes of these plugins and of operators alone, so nobody can have it ask for them.

This is text only: a block for the configuration of nats-server. Passwords are left to the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from limpet.errors import InvalidValue
from limpet.keys import check_namespace

__all__ = ["granting", "inbox_of", "password_of"]

SERVERS: Final = "_LIMPET.>"
OPERATORS: Final = "_INBOX.>"

_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\Z")


def granting(plugins: Sequence[str], *, prefix: str = "db.kv", server: str = "limpet") -> str:
    """The block of authorization for these plugins and the server's own user.

    Raises:
        InvalidNamespace: A name that no plugin can have.
        InvalidValue: A prefix that subjects cannot have, or a plugin with the name of the server's user.
    """
    names = [check_namespace(name) for name in sorted({*plugins})]
    if not _PREFIX.match(prefix):
        raise InvalidValue("a prefix is words of letters, digits, '_' and '-', joined by dots, such as db.kv")
    if check_namespace(server) in names:
        raise InvalidValue(f"{server!r} is the server's own user: give that another name")
    inboxes = [f"{inbox_of(name)}.>" for name in names]
    users = [
        _user(
            server,
            # Replies, and the heartbeats of watches; servers end each other's watches.
            publish=[*inboxes, OPERATORS, SERVERS],
            subscribe=[f"{prefix}.>", "$SRV.>", OPERATORS, SERVERS],
        ),
        *(_user(name, publish=[f"{prefix}.{name}.*"], subscribe=[f"{inbox_of(name)}.>"]) for name in names),
    ]
    return "authorization {\n  users: [\n" + "".join(users) + "  ]\n}\n"


def inbox_of(plugin: str) -> str:
    """What a plugin's inboxes start with: what it must tell its driver, as ``inbox_prefix``."""
    return f"_INBOX_{plugin}"


def password_of(user: str) -> str:
    """The environment variable of nats-server that holds a user's password."""
    return f"{user.upper().replace('-', '_')}_PASSWORD"


def _user(name: str, *, publish: Sequence[str], subscribe: Sequence[str]) -> str:
    return (
        f"    {{\n      user: {json.dumps(name)}, password: ${password_of(name)}\n"
        "      permissions: {\n"
        f"        publish: {{ allow: {json.dumps([*publish])} }}\n"
        f"        subscribe: {{ allow: {json.dumps([*subscribe])} }}\n"
        "      }\n    }\n"
    )
