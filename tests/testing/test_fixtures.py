"""The fixtures, in a test run of their own, as those who use them have them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes import unmeasured

CONFTEST = 'pytest_plugins = ["limpet.testing.fixtures"]\n'
TESTS = """
import limpet
import pytest

async def test_a_store_is_empty(store):
    assert (await store.keys()).keys == []
    await store.put("key", 1)

async def test_and_empty_again(store):
    assert (await store.keys()).keys == []

async def test_the_clock_is_turned(store, clock):
    await store.put("key", 1, ttl=60)
    clock.advance(60)
    assert await store.get("key") is None

def test_a_blocking_store_is_empty(sync_store):
    assert sync_store.keys().keys == []
    sync_store.put("key", 1)

def test_its_clock_is_turned(sync_store, clock):
    sync_store.put("key", 1, ttl=60)
    clock.advance(60)
    assert sync_store.get("key") is None

class TestWithFaults:
    @pytest.fixture
    def limpet_url(self):
        return "chaos:memory:?seed=3&rate=0.3"

    async def test_the_engine_is_another_one(self, store):
        for _ in range(50):
            await store.add("count")
        assert await store.get("count") == 50

class TestOnAServer:
    @pytest.fixture
    def limpet_url(self):
        return "redis://127.0.0.1:1/0"

    async def test_a_clock_that_cannot_be_turned(self, clock):
        raise AssertionError("this does not run")
"""


def test_the_fixtures_serve_a_test_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_program.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    )

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env=unmeasured(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "6 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "this engine goes by its server's clock" in done.stdout
