"""Calls with odd arguments: each succeeds, or raises one of our errors or a TypeError and changes nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import limpet
from limpet.conformance.oddities import calls, format_argument
from limpet.errors import LimpetError

PATIENCE_S: Final = 120.0


async def _finish(result: Any) -> None:
    """Await the result of a call; of an iterator, take the first item."""
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aenter__") and hasattr(result, "aclose"):
        async with result:
            return
    if isinstance(result, AsyncIterator):
        async for _ in result:
            break
        if hasattr(result, "aclose"):
            await result.aclose()


async def failures(
    store: limpet.Store, functions: Mapping[str, Callable[..., Any]], good: Mapping[str, object]
) -> list[str]:
    """The calls that raised a foreign error, or raised one of ours after they changed something."""
    found: list[str] = []
    for name, function in functions.items():
        for parameter, odd, arguments in calls(function, good):
            call = f"{name}({parameter}={format_argument(odd)})"
            before = (await store.status()).revision
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await _finish(function(*arguments.args, **arguments.kwargs))
            except (LimpetError, TypeError) as error:
                if (await store.status()).revision != before and "lock" not in name:
                    found.append(f"{call} changed something and raised {type(error).__name__}")
            except Exception as error:
                found.append(f"{call}: {type(error).__name__}: {error}")
    return found


def verbs(item: object, *but: str) -> dict[str, Callable[..., Any]]:
    """The public functions of an object."""
    found = inspect.getmembers(item, inspect.ismethod)
    return {name: method for name, method in found if not name.startswith("_") and name not in but}


def describe(found: list[str]) -> str:
    return f"{len(found)} calls:\n" + "\n".join(found)
