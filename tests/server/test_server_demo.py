"""The demonstration of a server: what it prints works, and Ctrl-C ends all of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "limpet.demo.server", "--http", "127.0.0.1:0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def read_until(demo: subprocess.Popen[str], word: str) -> str:
    assert demo.stdout is not None
    read = ""
    for line in demo.stdout:
        read += line
        if word in line:
            return read
    raise AssertionError(f"it ended without printing {word!r}: {read}")


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_plugins_are_at_work_until_it_is_ended(
    demo: subprocess.Popen[str], tmp_path: Path, sign: signal.Signals
) -> None:
    printed = read_until(demo, "changes so far")

    urls = re.findall(r"curl (?:-N )?'?(http://[^\s']+)", printed)
    assert len(urls) == 4
    for url in urls:
        if "watch" not in url:
            httpx2.get(url, timeout=PATIENCE_S).raise_for_status()
    command = re.search(r"^ +(\S*limpet --url .*)$", printed, re.MULTILINE)
    assert command is not None
    shown = subprocess.run(command[1], shell=True, capture_output=True, text=True, check=False, timeout=PATIENCE_S)  # noqa: S602
    assert shown.returncode == 0, shown.stderr
    assert "revision" in shown.stdout
    bus = re.search(r"NATS +nats://127\.0\.0\.1:(\d+)", printed)
    assert bus is not None
    assert re.search(r"trivia [1-9]", printed)

    demo.send_signal(sign)
    rest, complaints = demo.communicate(timeout=PATIENCE_S)

    assert demo.returncode == 128 + sign
    assert "The server has ended." in rest
    assert complaints == ""
    assert list(tmp_path.iterdir()) == []
