"""The line to NATS: who gets which message."""

from __future__ import annotations

import limpet
from tests.engines import unique
from tests.nats.support import engine_of, server, space_of


async def test_no_key_is_the_answer_to_a_request() -> None:
    """What a consumer delivers keeps the subject of its key, and a key may end like the name of a request.

    Here it does, while that request is under way.
    """
    async with limpet.open(server(), namespace=unique("n")) as store, store.watch() as watch:
        link = await engine_of(store).link()
        subject, number = link.listen(lambda *_: None)
        request = link.ask(subject)
        name = next(reversed(link._waiting)).decode()
        filler = "x" * (len(link._inbox) - len(space_of(store).subjects.data))

        await store.put(filler + name, 1)
        await anext(watch)

        assert not request.done()
        request.cancel()
        link.forget(number)
