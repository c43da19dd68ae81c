"""The semantic store under its pinned name; `limpet.semantic` is its package."""

from limpet import semantic
from limpet.semantic import *  # noqa: F403

__all__ = semantic.__all__
