"""The names of a server, which the ``Host`` of a request is compared with.

This is the protection against DNS rebinding. A web page whose name suddenly points to this machine is of the same
origin as this server for the browser, so that no check of origins stops it; but its requests carry its own name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

__all__ = ["ADDRESSES", "host_name", "is_known"]

ADDRESSES: Final = "any IP address"
"""Stands for every IP address in a list of names. An address, unlike a name, cannot be rebound."""


def host_name(header: str) -> str:
    """The name in a ``Host`` header, without its port, in lower case."""
    return re.sub(r":[0-9]*\Z", "", header).strip("[]").lower().rstrip(".")


def is_known(name: str, hosts: Sequence[str]) -> bool:
    """Whether a name is one of the server's."""
    return name in hosts or (ADDRESSES in hosts and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
