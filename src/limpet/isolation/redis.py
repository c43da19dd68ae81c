"""Walls on Redis: the rules by which the server itself keeps tenants apart.

The wall is a user of the server's access control list. It gets the keys of its namespaces and of
no others, and the commands that the engine needs. The server holds a script to the same rules, so
it does not matter which one is run.

This is text only, as with `limpet.isolation.postgres`. A later grant for the same user replaces an earlier one;
passwords are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from limpet.errors import InvalidValue
from limpet.keys import check_namespace

__all__ = ["granting", "revoking", "shown"]

_READING: Final = (
    *("auth", "client|setinfo", "cluster|slots", "eval", "evalsha", "exists", "get", "hello", "hexists", "hget"),
    *("hgetall", "hkeys", "hlen", "hmget", "info", "lrange", "ping", "select", "time", "type", "wait", "xlen"),
    *("xrange", "xread", "xrevrange", "zcard", "zcount", "zlexcount", "zrange", "zrangebylex", "zrangebyscore"),
)
_WRITING: Final = (
    *("del", "hdel", "hset", "hsetnx", "incrby", "pexpire", "rpush", "set", "unlink", "xadd", "xtrim", "zadd"),
    *("zrem", "zremrangebyscore"),
)
_NOTHING: Final = ("resetkeys", "resetchannels", "-@all")


def granting(
    user: str, *, namespaces: Sequence[str] = (), hash_tag: bool = True, read_only: bool = False, login: bool = False
) -> list[str]:
    """The words of the command that lets a user have these namespaces, or all where none is given.

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
    commands = _READING if read_only else sorted(_READING + _WRITING)
    keys = [f"~{pattern}" for pattern in ("limpet:store", *patterns)]
    switch = ["on"] if login else []
    return ["ACL", "SETUSER", _checked(user), *_NOTHING, *keys, *(f"+{name}" for name in commands), *switch]


def revoking(user: str) -> list[str]:
    """The words of the command that takes everything back."""
    return ["ACL", "SETUSER", _checked(user), *_NOTHING]


def shown(words: Sequence[str]) -> str:
    """A command as redis-cli takes it."""
    return " ".join(words) + "\n"


def _checked(user: str) -> str:
    if not user or not user.isprintable() or any(letter in " \"'\\" for letter in user):
        raise InvalidValue("a user of Redis has a name without spaces, quotation marks and backslashes")
    return user
