"""cachelib's tests for caches, run on ours. `tests.judges.run` copies this file beside them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from clear import ClearTests  # type: ignore[import-not-found]
from common import CommonTests  # type: ignore[import-not-found]
from delete_many_with_prefix import DeleteManyWithPrefixTests  # type: ignore[import-not-found]
from has import HasTests  # type: ignore[import-not-found]

from limpet.adapters.cachelib import Cache


@pytest.fixture(autouse=True)
def cache_factory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Caches on the judged engine, each in a namespace of its own."""
    made: list[Cache] = []

    def make(_: object, **options: Any) -> Cache:
        cache = Cache(os.environ["LIMPET_JUDGED_URL"], namespace=f"judged-{uuid.uuid4().hex[:12]}", **options)
        made.append(cache)
        return cache

    request.cls.cache_factory = make
    yield
    for cache in made:
        cache.close()


class TestCache(CommonTests, ClearTests, HasTests, DeleteManyWithPrefixTests):  # type: ignore[misc]
    """Everything that cachelib requires of a cache."""
