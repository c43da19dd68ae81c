"""A key-value bucket of NATS JetStream, made by any program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Self

from limpet.errors import InvalidValue, Unavailable
from limpet.moving.entries import Brought, Rejected
from limpet.moving.sources.values import as_item, from_json
from limpet.urls import Address

__all__ = ["NatsBucket"]

WAIT_S: Final = 30.0


class NatsBucket:
    """The entries of a bucket: the last value of each key."""

    needs_place = False

    def __init__(self, connection: Any, bucket: str, namespace: str, as_json: bool, shown: str) -> None:
        self._connection = connection
        self._context = connection.jetstream(timeout=WAIT_S)
        self._bucket = bucket
        self._namespace = namespace
        self._as_json = as_json
        self.shown = f"bucket {bucket} of {shown}"

    @classmethod
    async def open(cls, address: Address, namespace: str) -> Self:
        """Connect, and check that there is such a bucket."""
        address.allow("bucket", "values")
        bucket = address.options.get("bucket")
        if not bucket:
            raise InvalidValue(f"{address}: name the bucket, as in nats://host:4222?bucket=agent-state")
        as_json = address.take("values", "bytes", ("bytes", "json")) == "json"
        try:
            import nats
            from nats.js.errors import NotFoundError
        except ModuleNotFoundError as missing:
            raise InvalidValue(f"{address} needs nats: pip install 'limpet[nats]'") from missing
        try:
            server = address.url.partition("?")[0]
            connection = await nats.connect(
                server, connect_timeout=WAIT_S, max_reconnect_attempts=1, error_cb=_ignore_error
            )
        except (OSError, nats.errors.Error) as error:
            raise Unavailable(f"{address} cannot be reached: {type(error).__name__}") from None
        made = cls(connection, bucket, namespace, as_json, str(address))
        try:
            info = await made._context.stream_info(f"KV_{bucket}")
        except NotFoundError:
            await connection.close()
            raise InvalidValue(f"{address} has no bucket {bucket!r}") from None
        # A namespace of a store has subjects of its own beside those of the bucket.
        if len(info.config.subjects or ()) > 1:
            await connection.close()
            raise InvalidValue(f"bucket {bucket!r} is a Limpet store: 'limpet copy' copies it")
        made._max_age_s = info.config.max_age or 0
        return made

    _max_age_s: float = 0

    async def count(self) -> int | None:
        """See `ForeignData.count`."""
        info = await self._context.stream_info(f"KV_{self._bucket}", subjects_filter=">")
        return info.state.num_subjects if hasattr(info.state, "num_subjects") else None

    async def read(self) -> AsyncIterator[Brought | Rejected]:
        """See `ForeignData.read`."""
        from nats.js.api import ConsumerConfig, DeliverPolicy

        info = await self._context.stream_info(f"KV_{self._bucket}")
        if not info.state.messages:
            return
        subject = f"$KV.{self._bucket}.>"
        found = await self._context.subscribe(
            subject,
            stream=f"KV_{self._bucket}",
            ordered_consumer=True,
            config=ConsumerConfig(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT),
        )
        try:
            while True:
                message = await found.next_msg(timeout=WAIT_S)
                item = self._item(message)
                if item is not None:
                    yield item
                # A key that is written meanwhile has its last message further back, so read to the end.
                if message.metadata.num_pending == 0:
                    break
        finally:
            await found.unsubscribe()

    def _item(self, message: Any) -> Brought | Rejected | None:
        headers = message.headers or {}
        if "KV-Operation" in headers or "Nats-Marker-Reason" in headers:
            return None
        key = message.subject.removeprefix(f"$KV.{self._bucket}.")
        at_ms = int(message.metadata.timestamp.timestamp() * 1000)
        ends = [s for s in (self._max_age_s, _seconds(headers.get("Nats-TTL"))) if s]
        return as_item(
            self._namespace,
            key,
            lambda: from_json(message.data) if self._as_json else b"\0" + message.data,
            is_exact=True,
            # What the bucket calls the revision of an entry. It orders the writes of a key, as a version does.
            version=message.metadata.sequence.stream,
            created_ms=at_ms,
            updated_ms=at_ms,
            expires_ms=at_ms + int(min(ends) * 1000) if ends else None,
        )

    async def hand_over(self) -> str | None:
        """See `ForeignData.hand_over`."""
        return None

    async def finish(self) -> None:
        """See `ForeignData.finish`."""

    async def close(self) -> None:
        """See `ForeignData.close`."""
        await self._connection.close()


async def _ignore_error(_: Exception) -> None:
    """The driver would print it. The call that needs the connection raises it."""


def _seconds(text: str | None) -> float:
    """A time to live as NATS writes it: seconds, or with a unit."""
    if not text or text == "never":
        return 0
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    for unit, factor in units.items():
        if text.endswith(unit) and text.removesuffix(unit).replace(".", "", 1).isdigit():
            return float(text.removesuffix(unit)) * factor
    return float(text) if text.isdigit() else 0
