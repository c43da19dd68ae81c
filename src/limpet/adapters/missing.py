"""What is said when the framework of an adapter is not installed: which extra installs it."""

from __future__ import annotations

__all__ = ["missing_framework"]


def missing_framework(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Make the error to raise in place of one that an import of the framework has raised."""
    name = error.name or "a package"
    return ModuleNotFoundError(
        f"limpet.adapters.{extra} needs {name}, which is not installed: pip install 'limpet[{extra}]'",
        name=error.name,
        path=error.path,
    )
