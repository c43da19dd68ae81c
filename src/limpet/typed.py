"""A view of the keys under a prefix whose values are of one model: a dataclass, a msgspec struct or a pydantic model.

A value is stored as plain JSON and checked when it is read: another program, or an older version of this one, may have
written it. It is also checked before it is written, because a model need not check what it is made of, and what a view
cannot read back would be an error of every later reader.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from limpet import codec
from limpet.codec import Stored
from limpet.draft import TTL, Expectation, Fence, Fencing, Meta
from limpet.errors import InvalidValue, TypeMismatch
from limpet.keys import prefix_span
from limpet.model import ABSENT, ANY, KEEP, UNCHANGED, Entry, Filter, Sentinel

if TYPE_CHECKING:
    from limpet.store import Store

__all__ = ["Typed", "TypedEntry"]

T = TypeVar("T")

Changed: TypeAlias = T | Literal[Sentinel.ABSENT, Sentinel.UNCHANGED]
"""What the function of an update returns."""


class TypedEntry(msgspec.Struct, Generic[T], frozen=True):
    """An entry of a view.

    Attributes:
        key: The key, without the prefix of the view.
        value: The value, as the model.
        entry: The entry as the store has it.
    """

    key: str
    value: T
    entry: Entry

    @property
    def version(self) -> int:
        """Counts the writes of this key since it was created."""
        return self.entry.version

    @property
    def revision(self) -> int:
        """Orders the changes of the namespace."""
        return self.entry.revision

    @property
    def created_at(self) -> datetime:
        """When this incarnation of the key began, UTC."""
        return self.entry.created_at

    @property
    def updated_at(self) -> datetime:
        """When the value was last written, UTC."""
        return self.entry.updated_at

    @property
    def expires_at(self) -> datetime | None:
        """From when on the entry counts as absent, UTC. None means never."""
        return self.entry.expires_at

    @property
    def meta(self) -> dict[str, Any]:
        """The JSON object beside the value."""
        return self.entry.meta

    def __repr__(self) -> str:
        # Without the value, as the repr of an entry.
        return f"TypedEntry({self.key!r}, version={self.version}, revision={self.revision})"


class Typed(Generic[T]):
    """A view of the keys under a prefix as values of one model. Get one from `Store.typed`."""

    def __init__(self, store: Store, model: type[T], prefix: str) -> None:
        prefix_span(prefix)
        self.prefix = prefix
        self._store = store
        self._form: _Form[T] = _find_form(model)
        self._name = model.__name__
        self._model = model

    async def get(self, key: str) -> T | None:
        """The value under a key; None when the key is absent."""
        entry = await self._store.entry(self.prefix + key)
        return None if entry is None else self._decode(entry)

    async def entry(self, key: str) -> TypedEntry[T] | None:
        """The value with its version, revision, times and meta; None when the key is absent."""
        entry = await self._store.entry(self.prefix + key)
        return None if entry is None else self._typed(entry)

    async def scan(
        self,
        prefix: str = "",
        *,
        where: Filter | None = None,
        limit: int | None = None,
        after: str | None = None,
        reverse: bool = False,
    ) -> AsyncIterator[TypedEntry[T]]:
        """Entries in code-point order; with ``where``, those that match. See `Store.scan`."""
        start = after if after is None else self.prefix + after
        found = self._store.scan(self.prefix + prefix, where=where, limit=limit, after=start, reverse=reverse)
        async for entry in found:
            yield self._typed(entry)

    async def put(
        self,
        key: str,
        value: T,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = None,
        expect: Expectation | TypedEntry[T] = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = None,
    ) -> TypedEntry[T]:
        """Replace the value under a key. See `Store.put`; ``expect`` may be an entry of this view."""
        encoded, expected = self._encode(self.prefix + key, value), _expected(expect)
        return self._typed(
            await self._store.put(
                self.prefix + key, encoded, ttl=ttl, expect=expected, fence=fence, request_id=request_id, meta=meta
            )
        )

    async def create(
        self,
        key: str,
        value: T,
        *,
        ttl: TTL = None,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta = None,
    ) -> TypedEntry[T]:
        """Put a value under a key that must not exist. Raises `Conflict` when it does."""
        return await self.put(key, value, ttl=ttl, expect=ABSENT, fence=fence, request_id=request_id, meta=meta)

    async def update(
        self,
        key: str,
        change: Callable[[T | None], Changed[T]] | Callable[[T | None], Awaitable[Changed[T]]],
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        fence: Fencing | Fence | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> TypedEntry[T] | None:
        """Change a value by a function, plain or async, of the value found. See `Store.update`."""
        if not callable(change):
            raise TypeError(f"update takes a function of the value, not something of type {type(change).__name__}")
        name = self.prefix + key

        def change_entry(found: Entry | None) -> Any:
            changed = change(None if found is None else self._decode(found))
            return self._encode_later(name, changed) if inspect.isawaitable(changed) else self._encode(name, changed)

        entry = await self._store._change(name, change_entry, ttl=ttl, fence=fence, meta=meta)
        return None if entry is None else self._typed(entry)

    async def delete(
        self,
        key: str,
        *,
        expect: Expectation | TypedEntry[T] = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> bool:
        """End a key. False when it did not exist."""
        expected = _expected(expect)
        return await self._store.delete(self.prefix + key, expect=expected, fence=fence, request_id=request_id)

    # Between the model and what is stored ----------------------------------------

    def _typed(self, entry: Entry) -> TypedEntry[T]:
        return TypedEntry(entry.key.removeprefix(self.prefix), self._decode(entry), entry)

    def _decode(self, entry: Entry) -> T:
        assert entry.stored is not None
        try:
            return self._load(entry.stored)
        except _Unfit as unfit:
            found = f"a value that is no {self._name} ({unfit.problem} at {unfit.path})"
            raise TypeMismatch(entry.key, expected=f"a {self._name}", found=found, path=unfit.path) from None

    async def _encode_later(self, key: str, value: Awaitable[Any]) -> Any:
        return self._encode(key, await value)

    def _encode(self, key: str, value: Any) -> Any:
        """The value as JSON; ABSENT and UNCHANGED stay what they are."""
        if value is ABSENT or value is UNCHANGED:
            return value
        if not isinstance(value, self._model):
            raise InvalidValue(f"{key!r} takes a {self._name}, not something of type {type(value).__name__}", key=key)
        try:
            encoded = self._form.dump(value)
            self._load(codec.encode(encoded))
        except _Unfit as unfit:
            problem, path = unfit.problem, unfit.path
        except InvalidValue as error:
            problem, path = str(error).removesuffix(f" at {error.path}"), error.path or "$"
        except (TypeError, ValueError, RecursionError) as error:
            # The words of the model's own code may quote the value.
            problem, path = f"it cannot be written as JSON ({type(error).__name__})", "$"
        else:
            return encoded
        raise InvalidValue(f"{key!r} takes a {self._name}, and this is none: {problem}", path=path, key=key)

    def _load(self, stored: Stored) -> T:
        if codec.kind_of(stored) == "bytes":
            raise _Unfit("it is raw bytes", "$")
        return self._form.load(stored)

    def __repr__(self) -> str:
        return f"Typed({self._name}, {self.prefix!r} in {self._store!r})"


def _expected(expect: Expectation | TypedEntry[Any]) -> Expectation:
    return expect.entry if isinstance(expect, TypedEntry) else expect


# The kinds of models ---------------------------------------------------------------


class _Unfit(Exception):
    """A value does not fit the model: what is wrong with it, and where."""

    def __init__(self, problem: str, path: str) -> None:
        self.problem, self.path = problem, path


class _Form(Protocol[T]):
    """How values of a model become JSON, and are made of it."""

    def dump(self, value: T) -> Any:
        """The value as JSON."""
        ...

    def load(self, stored: Stored) -> T:
        """The value that is stored, as JSON or as a record. Raises `_Unfit`."""
        ...


def _find_form(model: Any) -> _Form[Any]:
    if isinstance(model, type) and hasattr(model, "__pydantic_validator__"):
        return _PydanticForm(model)
    if isinstance(model, type) and (issubclass(model, msgspec.Struct) or dataclasses.is_dataclass(model)):
        return _StructForm(model)
    shown = getattr(model, "__name__", type(model).__name__)
    raise TypeError(f"a typed view takes a dataclass, a msgspec struct or a pydantic model, and {shown} is none")


# What msgspec says with these words holds names and types, and nothing of a value.
_HARMLESS: Final = ("Expected `", "Object missing required field", "Object contains unknown field")


class _StructForm(Generic[T]):
    """Dataclasses and structs, by msgspec."""

    def __init__(self, model: type[T]) -> None:
        self._model = model
        self._decode = msgspec.json.Decoder(model).decode

    def dump(self, value: T) -> Any:
        return msgspec.to_builtins(value, str_keys=True)

    def load(self, stored: Stored) -> T:
        try:
            if isinstance(stored, bytes):
                return self._decode(stored)
            return msgspec.convert(codec.decode(stored), self._model, str_keys=True)
        except msgspec.DecodeError as error:
            text, _, at = str(error).partition(" - at `")
            # The words of the model's own checks may quote the value.
            is_harmless = error.__cause__ is None and text.startswith(_HARMLESS)
            raise _Unfit(text if is_harmless else "not valid", at.removesuffix("`") or "$") from None


class _PydanticForm(Generic[T]):
    """Models and dataclasses of pydantic, which is imported only here."""

    def __init__(self, model: type[T]) -> None:
        import pydantic

        self._adapter = pydantic.TypeAdapter(model)
        self._error = pydantic.ValidationError

    def dump(self, value: T) -> Any:
        # A warning would quote the value. What it warns of is found when the value is loaded again.
        return self._adapter.dump_python(value, mode="json", by_alias=True, round_trip=True, warnings=False)

    def load(self, stored: Stored) -> T:
        try:
            if isinstance(stored, bytes):
                return self._adapter.validate_json(stored)
            return self._adapter.validate_python(dict(codec.decode(stored)))
        except self._error as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
            raise _Unfit(first["type"], "$" + "".join(steps)) from None
