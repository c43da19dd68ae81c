"""The connection to NATS: which waiter gets which message."""

from __future__ import annotations

import limpet
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
