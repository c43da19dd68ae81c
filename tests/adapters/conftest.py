"""Fixtures of these tests: every engine, by URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import ENGINES, url_of


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an engine."""
    return url_of(request.param, tmp_path)
