"""The connection to NATS: which waiter gets which message."""

from __future__ import annotations

import asyncio
import time

import pytest

import limpet
from limpet.engines.nats.connection import NoReply
from tests.engines import unique
from tests.nats.support import engine_of, server, stream_of


async def test_no_key_is_the_answer_to_a_request() -> None:
    """A delivered message keeps the subject of its key, and a key may end like the token of a request.

    Here it does, while that request is under way.
    """
    async with limpet.open(server(), namespace=unique("n")) as store, store.watch() as watch:
        connection = await engine_of(store).connection()
        subject, number = connection.subscribe(lambda *_: None)
        request = connection.request(subject)
        name = next(reversed(connection._waiting)).decode()
        filler = "x" * (len(connection._inbox) - len(stream_of(store).subjects.data))

        await store.put(filler + name, 1)
        await anext(watch)

        assert not request.done()
        request.cancel()
        connection.unsubscribe(number)


async def test_a_reply_that_came_while_the_process_stood_still_is_taken() -> None:
    """Trimming 900,000 changes held the loop for almost as long as a request may take.

    The loop looks at its timers before the driver has parsed what came, so that the request was called late.
    """
    async with limpet.open(server(), namespace=unique("n")) as store:
        connection = await engine_of(store).connection()
        request = connection.request("$JS.API.INFO", wait_s=0.4)
        await asyncio.sleep(0)
        time.sleep(0.8)  # noqa: ASYNC251 - the loop is to stand still

        assert b"memory" in (await request)[1]


async def test_a_request_without_a_reply_ends_after_the_process_stood_still() -> None:
    async with limpet.open(server(), namespace=unique("n")) as store:
        connection = await engine_of(store).connection()
        subject, number = connection.subscribe(lambda *_: None)
        request = connection.request(subject, wait_s=0.1)
        await asyncio.sleep(0)
        time.sleep(0.8)  # noqa: ASYNC251 - the loop is to stand still

        with pytest.raises(NoReply):
            await asyncio.wait_for(request, 5)
        connection.unsubscribe(number)
