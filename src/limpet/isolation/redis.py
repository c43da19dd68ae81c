"""Isolation on Redis: rules by which the server itself keeps tenants apart.

A tenant is a user of the server's access control list. It gets the keys of its namespaces and no others, and only the
commands that the engine needs. The server applies the same rules inside a script, so the user may run any script.

This module only makes text, like `limpet.isolation.postgres`. A later grant for the same user replaces an earlier one;
passwords stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from limpet.errors import InvalidValue
from limpet.keys import check_namespace

__all__ = ["command_text", "grant_acl", "revoke_acl"]

_READ_COMMANDS: Final = (
    *("auth", "client|setinfo", "cluster|slots", "eval", "evalsha", "exists", "get", "hello", "hexists", "hget"),
    *("hgetall", "hkeys", "hlen", "hmget", "info", "lrange", "ping", "select", "time", "type", "wait", "xlen"),
    *("xrange", "xread", "xrevrange", "zcard", "zcount", "zlexcount", "zrange", "zrangebylex", "zrangebyscore"),
)
_WRITE_COMMANDS: Final = (
    *("del", "hdel", "hset", "hsetnx", "incrby", "pexpire", "rpush", "set", "unlink", "xadd", "xtrim", "zadd"),
    *("zrem", "zremrangebyscore"),
)
_RESET: Final = ("resetkeys", "resetchannels", "-@all")


def grant_acl(
    user: str, *, namespaces: Sequence[str] = (), hash_tag: bool = True, read_only: bool = False, login: bool = False
) -> list[str]:
    """The command, word by word, that lets a user use these namespaces, or all if none is given.

    Raises:
        InvalidValue: A name that no user can have.
        InvalidNamespace: A name that no namespace can have.
    """
    spaces = [check_namespace(name) for name in sorted({*namespaces})] or ["*"]
    patterns = [
        pattern
        for name in spaces
        for pattern in ((f"limpet:{{{name}}}:*", f"{{{name}}}:*") if hash_tag else (f"limpet:{name}:*", f"{name}:*"))
    ]
    commands = _READ_COMMANDS if read_only else sorted(_READ_COMMANDS + _WRITE_COMMANDS)
    keys = [f"~{pattern}" for pattern in ("limpet:store", *patterns)]
    switch = ["on"] if login else []
    return ["ACL", "SETUSER", _check_user(user), *_RESET, *keys, *(f"+{name}" for name in commands), *switch]


def revoke_acl(user: str) -> list[str]:
    """The command, word by word, that takes everything back from a user."""
    return ["ACL", "SETUSER", _check_user(user), *_RESET]


def command_text(words: Sequence[str]) -> str:
    """A command as redis-cli reads it."""
    return " ".join(words) + "\n"


def _check_user(user: str) -> str:
    if not user or not user.isprintable() or any(letter in " \"'\\" for letter in user):
        raise InvalidValue("the name of a Redis user is printable, without spaces, quotation marks and backslashes")
    return user
