"""The server: a store that other processes and other languages use, over NATS subjects and over HTTP.

`serve_in_process` runs one inside a Python program; ``limpet serve`` runs one as a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limpet.server.service import serve_in_process

__all__ = ["serve_in_process"]


def __getattr__(name: str) -> Any:
    """Load the server when it is first used, because it imports packages that a client does not need."""
    if name not in __all__:
        raise AttributeError(f"module 'limpet.server' has no attribute {name!r}")
    from limpet.server.service import serve_in_process

    globals()[name] = serve_in_process
    return serve_in_process
