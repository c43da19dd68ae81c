"""Errors of the driver and of JetStream: which of ours they become."""

from __future__ import annotations

import ssl

import nats.errors
import pytest

import limpet
from limpet.engines.nats.connection import ApiError, ConnectionLost, NoReply, NoResponders
from limpet.errors import InvalidValue, LimpetError, PermissionDenied, Unavailable
from tests.engines import unique
from tests.nats.support import engine_of, server


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionLost(), Unavailable),
        (NoReply(), Unavailable),
        (NoResponders(), Unavailable),
        # Not enough room, no leader, a stream that was removed meanwhile.
        (ApiError(10023, "insufficient resources"), Unavailable),
        (ApiError(10008, "JetStream system temporarily unavailable"), Unavailable),
        (ApiError(10059, "stream not found"), Unavailable),
        (ApiError(10052, "invalid configuration"), InvalidValue),
        (nats.errors.AuthorizationError(), PermissionDenied),
        (nats.errors.Error("nats: 'Authorization Violation'"), PermissionDenied),
        (nats.errors.NoServersError(), Unavailable),
        (nats.errors.ConnectionClosedError(), Unavailable),
        (nats.errors.TimeoutError(), Unavailable),
        (OSError("away"), Unavailable),
        (TimeoutError(), Unavailable),
        (ssl.SSLCertVerificationError("untrusted"), Unavailable),
        (FileNotFoundError(2, "No such file or directory"), InvalidValue),
        (ValueError("a part of a key"), InvalidValue),
    ],
)
async def test_each_error_has_its_error(error: Exception, expected: type[LimpetError]) -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        translated = engine_of(store)._translate(error)

    assert type(translated) is expected
    assert "a part of a key" not in str(translated)
