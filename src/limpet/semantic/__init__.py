"""The semantic store: tenants and projects, envelopes, an audit trail, dead letters, retries."""

from limpet.semantic.store import *  # noqa: F403
from limpet.semantic.store import __all__ as _names

__all__ = list(_names)
