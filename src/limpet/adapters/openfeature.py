"""A provider of feature flags for OpenFeature: flags from the store, which all processes see within moments.

A flag is an entry: its name is the key, after the prefix, and its value the value. A thread of the provider watches the
prefix and keeps a copy of the flags, so that an evaluation costs no round trip and works with and without await. Each
change is announced to OpenFeature's handlers. While the store cannot be reached, the copy serves on, marked as stale.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from openfeature.evaluation_context import EvaluationContext
from openfeature.event import ProviderEventDetails
from openfeature.exception import FlagNotFoundError, GeneralError, ProviderNotReadyError, TypeMismatchError
from openfeature.flag_evaluation import FlagMetadata, FlagResolutionDetails, FlagValueType, Reason
from openfeature.provider import AbstractProvider, Metadata

from limpet.adapters.names import check_prefix
from limpet.errors import LimpetError
from limpet.hub import Watch
from limpet.model import Event, Synced
from limpet.store import Store
from limpet.store import open as open_store

__all__ = ["Provider"]

log = logging.getLogger("limpet.adapters.openfeature")

PREFIX: Final = "flags/"
CHECK_S = 5.0
"""How often to find out whether the store answers."""

Object = Sequence[FlagValueType] | Mapping[str, FlagValueType]


class _Flag(NamedTuple):
    """A flag as it is in the store. Its meta may name the variant."""

    value: Any
    meta: Mapping[str, Any]


class Provider(AbstractProvider):
    """Feature flags from a store.

    Args:
        url: The URL; ``LIMPET_URL`` or ``./limpet.db`` when not given. It is opened in a thread of its own when
            OpenFeature takes the provider, and closed when OpenFeature shuts it down.
        namespace: The namespace that the URL is opened with.
        prefix: What the keys of all flags start with.
        timeout: How many seconds to wait for the flags at the beginning.
    """

    def __init__(
        self, url: str | None = None, *, namespace: str = "default", prefix: str = PREFIX, timeout: float = 30
    ) -> None:
        super().__init__()
        self._url, self._namespace, self._prefix, self._timeout_s = url, namespace, check_prefix(prefix), timeout
        self._flags: dict[str, _Flag] | None = None
        self._is_stale = False
        self._loaded = threading.Event()
        # Held while a thread starts, so that a shutdown finds how to stop it.
        self._starting = threading.Lock()
        self._error: LimpetError | None = None
        self._stop: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None

    def get_metadata(self) -> Metadata:
        """The name of the provider."""
        return Metadata(name="Limpet")

    # Opening and closing ------------------------------------------------------

    def initialize(self, evaluation_context: EvaluationContext) -> None:
        """Open the store and wait for the flags."""
        self._loaded.clear()
        self._error = None
        with self._starting:
            started = threading.Event()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._run(started)), name="limpet-flags", daemon=True
            )
            self._thread.start()
            started.wait()
        is_loaded = self._loaded.wait(self._timeout_s)
        if self._error is not None:
            raise GeneralError(f"the flags cannot be read: {self._error}") from self._error
        if not is_loaded:
            self.shutdown()
            raise GeneralError(f"no flags came within {self._timeout_s:g} seconds")

    def shutdown(self) -> None:
        """Close the store and end the thread."""
        with self._starting:
            stop, thread, self._stop, self._thread = self._stop, self._thread, None, None
        if stop is not None:
            stop()
        if thread is not None:
            thread.join()
        self._flags = None

    async def _run(self, started: threading.Event) -> None:
        loop, following = asyncio.get_running_loop(), asyncio.ensure_future(self._follow())

        def stop() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(following.cancel)

        self._stop = stop
        started.set()
        await asyncio.wait([following])

    async def _follow(self) -> None:
        """Keep the copy up to date until this is cancelled."""
        while True:
            try:
                async with (
                    open_store(self._url, namespace=self._namespace) as store,
                    store.watch(f"{self._prefix}*", initial=True) as watch,
                ):
                    checking = asyncio.ensure_future(self._check(store))
                    try:
                        await self._take(watch)
                    finally:
                        checking.cancel()
            except LimpetError as error:
                if self._flags is None:
                    self._error = error
                    self._loaded.set()
                    return
                self._mark_stale(error)
            await asyncio.sleep(CHECK_S)

    async def _check(self, store: Store) -> None:
        """Find out whether the store answers: a watch waits in silence until it does, and then misses nothing."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await store.entry(self._prefix)
            except LimpetError as error:
                self._mark_stale(error)
            else:
                self._mark_ready()

    def _mark_stale(self, error: LimpetError) -> None:
        if not self._is_stale:
            log.warning("flags may be out of date: %s", error)
            self._is_stale = True
            self.emit_provider_stale(ProviderEventDetails(message=str(error)))

    def _mark_ready(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self.emit_provider_ready(ProviderEventDetails())

    async def _take(self, watch: Watch) -> None:
        """Take the flags that there are, and then each change."""
        initial: dict[str, _Flag] = {}
        async for event in watch:
            if isinstance(event, Synced):
                self._replace(initial)
                break
            self._apply(event, initial)
        async for event in watch:
            if self._flags is not None and self._apply(event, self._flags):
                self.emit_provider_configuration_changed(ProviderEventDetails(flags_changed=[self._name(event)]))

    def _apply(self, event: Event, flags: dict[str, _Flag]) -> bool:
        """Apply a change. False if no flag has changed by it."""
        match event.op:
            case "put" | "patch" if event.entry is not None:
                flags[self._name(event)] = _Flag(event.value, event.entry.meta)
            case "delete" | "expire":
                flags.pop(self._name(event), None)
            case _:
                return False
        return True

    def _replace(self, flags: dict[str, _Flag]) -> None:
        """Take the flags that are there when the store was opened, for the first time or again."""
        before, self._flags = self._flags, flags
        self._loaded.set()
        self._mark_ready()
        changed = (
            [] if before is None else [name for name in {**before, **flags} if before.get(name) != flags.get(name)]
        )
        if changed:
            self.emit_provider_configuration_changed(ProviderEventDetails(flags_changed=sorted(changed)))

    def _name(self, event: Event) -> str:
        return event.key.removeprefix(self._prefix)

    # Evaluation ---------------------------------------------------------------

    def resolve_boolean_details(
        self, flag_key: str, default_value: bool, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[bool]:
        """A flag that is true or false."""
        return self._resolve(flag_key, bool)

    def resolve_string_details(
        self, flag_key: str, default_value: str, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[str]:
        """A flag that is a text."""
        return self._resolve(flag_key, str)

    def resolve_integer_details(
        self, flag_key: str, default_value: int, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[int]:
        """A flag that is an integer."""
        return self._resolve(flag_key, int)

    def resolve_float_details(
        self, flag_key: str, default_value: float, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[float]:
        """A flag that is a number."""
        found = self._resolve(flag_key, float, int)
        found.value = float(found.value)
        return found

    def resolve_object_details(
        self, flag_key: str, default_value: Object, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[Object]:
        """A flag that is an object or a list. It is shared by all callers: do not change it."""
        return self._resolve(flag_key, dict, list)

    def _resolve(self, name: str, *kinds: type) -> FlagResolutionDetails[Any]:
        flags = self._flags
        if flags is None:
            raise ProviderNotReadyError("the flags are not loaded")
        flag = flags.get(name)
        if flag is None:
            raise FlagNotFoundError(f"flag {name!r} is not in the store")
        if type(flag.value) not in kinds:
            raise TypeMismatchError(f"flag {name!r} is of type {type(flag.value).__name__}, not {kinds[0].__name__}")
        metadata: FlagMetadata = {
            key: value for key, value in flag.meta.items() if isinstance(value, bool | int | float | str)
        }
        variant = metadata.get("variant")
        return FlagResolutionDetails(
            value=flag.value,
            reason=Reason.STALE if self._is_stale else Reason.STATIC,
            variant=variant if isinstance(variant, str) else None,
            flag_metadata=metadata,
        )
