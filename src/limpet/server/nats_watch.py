"""Watches over NATS: changes sent to plugins as they happen.

A plugin subscribes to an inbox and requests a watch; events are sent there as JSON, in the order of their revisions.
A heartbeat every few seconds lets a plugin notice that a server is gone; it resumes with another after the last
position that it saw. When no one is subscribed any more, NATS reports that, and the watch ends.

A watch belongs to one server, whose id is the first part of the watch's id. A server that receives the request to end
a watch of another server forwards it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from limpet.errors import InvalidValue, LimpetError, RateLimited
from limpet.hub import Watch
from limpet.model import Event
from limpet.protocol.json import event_as_json
from limpet.server.nats_errors import reply_of
from limpet.server.requests import Deliver
from limpet.store import Store

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

__all__ = ["SERVERS", "Deliveries", "Delivery", "is_answerable"]

SERVERS: Final = "_LIMPET"
"""The first token of subjects on which servers talk to each other."""

BEAT_S: Final = 5.0
MISSED_MAX: Final = 2
FORWARD_S: Final = 2.0
WATCHES_MAX: Final = 4096
WATCHES_OF_PLUGIN_MAX: Final = 256
END_S: Final = 1.0

_SERVER_ID: Final = re.compile(r"[A-Za-z0-9]{1,64}\Z")
_NO_RESPONDERS: Final = "503"


class Delivery:
    """One watch, and where its events go."""

    def __init__(self, name: str, plugin: str, subject: str, changes: Watch, position: str | None) -> None:
        self.id = name
        self.plugin = plugin
        self.subject = subject
        self.changes = changes
        self.position = position
        self.task: asyncio.Task[None] | None = None
        self.was_missed = False
        self.missed = 0


class Deliveries:
    """The watches of one server."""

    def __init__(self, connection: Client, server_id: str, *, beat_s: float = BEAT_S) -> None:
        self._connection = connection
        self._server_id = server_id
        self._beat_s = beat_s
        self._numbers = itertools.count(1)
        self._inbox = connection.new_inbox()
        self._running: dict[str, Delivery] = {}
        self._subscriptions: list[Subscription] = []
        self._beating: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """The number of watches."""
        return len(self._running)

    async def start(self) -> None:
        """Subscribe to forwarded requests of other servers, and to reports of heartbeats without a subscriber."""
        self._subscriptions = [
            await self._connection.subscribe(f"{self._inbox}.*", cb=self._note_missed),
            await self._connection.subscribe(f"{SERVERS}.{self._server_id}", cb=self._end_for_other_server),
        ]
        self._beating = asyncio.get_running_loop().create_task(self._beat(), name="limpet-heartbeats")

    async def close(self) -> None:
        """End every watch, and send each subscriber the reason."""
        if self._beating is not None:
            self._beating.cancel()
        await asyncio.gather(*(self._end(delivery, "stopping") for delivery in [*self._running.values()]))
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    # Beginning and ending -----------------------------------------------------

    async def begin(self, plugin: str, store: Store, request: Deliver, reply: str) -> tuple[Delivery, dict[str, Any]]:
        """Open a watch and return it with its reply. No event is sent before `run`."""
        subject = check_subject(request.deliver or reply, plugin)
        of_plugin = sum(delivery.plugin == plugin for delivery in self._running.values())
        if len(self._running) >= WATCHES_MAX or of_plugin >= WATCHES_OF_PLUGIN_MAX:
            raise RateLimited(
                "this server has all the watches that it allows; end one, or try again later", retry_after=self._beat_s
            )
        changes = store.watch(request.pattern, after=request.after, initial=request.initial)
        await changes.__aenter__()
        # In the reply, so that the caller misses nothing if this server is gone before the first event.
        position = changes.position if request.after is None else None
        delivery = Delivery(f"{self._server_id}.{next(self._numbers)}", plugin, subject, changes, position)
        self._running[delivery.id] = delivery
        return delivery, {
            "watch": delivery.id,
            "subject": subject,
            "position": position,
            "heartbeat": self._beat_s,
        }

    def run(self, delivery: Delivery) -> None:
        """Send the events from now on."""
        delivery.task = asyncio.get_running_loop().create_task(self._send_all(delivery), name="limpet-delivery")

    async def end(self, plugin: str, watch: str) -> bool:
        """End a watch of a plugin, here or on the server that runs it. False when no server has it."""
        server_id = watch.partition(".")[0]
        if server_id == self._server_id:
            return await self._end_here(plugin, watch)
        if not _SERVER_ID.match(server_id):
            return False
        body = msgspec.json.encode({"plugin": plugin, "watch": watch})
        with contextlib.suppress(Exception):
            reply = await self._connection.request(f"{SERVERS}.{server_id}", body, timeout=FORWARD_S)
            return bool(msgspec.json.decode(reply.data)["ended"])
        return False

    async def _end_for_other_server(self, message: Msg) -> None:
        """End a watch that runs here, at a request that another server received and forwarded."""
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            forwarded = msgspec.json.decode(message.data)
            ended = await self._end_here(forwarded["plugin"], forwarded["watch"])
            if message.reply:
                await self._connection.publish(message.reply, msgspec.json.encode({"ended": ended}))

    async def _end_here(self, plugin: str, watch: str) -> bool:
        delivery = self._running.get(watch)
        if delivery is None or delivery.plugin != plugin:
            return False
        await self._end(delivery, "unwatched")
        return True

    async def _end(self, delivery: Delivery, reason: str, **more: Any) -> None:
        if self._running.pop(delivery.id, None) is None:
            return
        await delivery.changes.aclose()
        if delivery.task is not None and delivery.task is not asyncio.current_task():
            delivery.task.cancel()
            await asyncio.gather(delivery.task, return_exceptions=True)
        with contextlib.suppress(Exception):
            last = {"op": "end", "watch": delivery.id, "reason": reason, "position": delivery.position, **more}
            async with asyncio.timeout(END_S):
                await self._connection.publish(delivery.subject, msgspec.json.encode(last))

    # Sending ------------------------------------------------------------------

    async def _send_all(self, delivery: Delivery) -> None:
        try:
            async for event in delivery.changes:
                await self._connection.publish(delivery.subject, self._encode_event(delivery, event))
                delivery.position = event.position or delivery.position
        except LimpetError as error:
            reply = reply_of(error)
            await self._end(delivery, "failed", error_code=reply["error_code"], message=reply["message"])
        except Exception:
            # The connection to NATS is lost, and with it the subscriber, as far as this server knows.
            await self._end(delivery, "failed")
        else:
            await self._end(delivery, "stopping")

    def _encode_event(self, delivery: Delivery, event: Event) -> bytes:
        document = {**event_as_json(event), "watch": delivery.id}
        body = msgspec.json.encode(document)
        if len(body) > self._connection.max_payload:
            # Written through another interface, where values may be larger. The plugin can read it by its key.
            body = msgspec.json.encode({**document, "value": None, "omitted": True})
        return body

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            for delivery in [*self._running.values()]:
                delivery.missed = delivery.missed + 1 if delivery.was_missed else 0
                delivery.was_missed = False
                if delivery.missed >= MISSED_MAX:
                    await self._end(delivery, "unheard")
                    continue
                beat = {"op": "heartbeat", "watch": delivery.id, "position": delivery.position}
                number = delivery.id.rpartition(".")[2]
                with contextlib.suppress(Exception):
                    await self._connection.publish(
                        delivery.subject, msgspec.json.encode(beat), reply=f"{self._inbox}.{number}"
                    )

    async def _note_missed(self, message: Msg) -> None:
        """Handle a reply to a heartbeat. NATS sends one when it has no subscriber; plugins may, and need not."""
        if not message.data and message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            delivery = self._running.get(f"{self._server_id}.{message.subject.rpartition('.')[2]}")
            if delivery is not None:
                delivery.was_missed = True


def check_subject(subject: str, plugin: str) -> str:
    """Return the subject that a plugin wants its events on, if it is an inbox and not that of another plugin."""
    if not is_inbox(subject, plugin):
        raise InvalidValue(f"events are delivered to a subject below _INBOX or _INBOX_{plugin}", path="$.deliver")
    return subject


def is_inbox(subject: str, plugin: str | None) -> bool:
    """Whether a subject is an inbox that this plugin may use; with no plugin, that any plugin may use.

    A reply or an event has the form of a request. Sent to any subject that a plugin names, it could act as a request of
    the server, which may act for every plugin; sent to the inbox of another plugin, it would pass as that one's reply.
    """
    word, dot, rest = subject.partition(".")
    if not dot or not _LITERAL.match(rest):
        return False
    return word == "_INBOX" or (word.startswith("_INBOX_") if plugin is None else word == f"_INBOX_{plugin}")


def is_answerable(reply: str, plugin: str | None) -> bool:
    """Whether a reply subject is an inbox, or a rewritten inbox of a request from another account or cluster.

    NATS writes ``_R_.…`` for a request from another account, and puts ``_GR_.<cluster>.<server>.`` before the inbox of
    a request that came through a gateway. It lets no client use a reply subject that starts so.
    """
    if reply.startswith("_R_."):
        return bool(_LITERAL.match(reply))
    if reply.startswith("_GR_."):
        reply = reply.split(".", 3)[-1]
    return is_inbox(reply, plugin)


_LITERAL: Final = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*\Z")
