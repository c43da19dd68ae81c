"""The options of ``limpet mcp`` that are refused, and why."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.support import Limpet, command


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--http", "0.0.0.0:8090"], "add --auth tokens"),
        (["--http", "8090"], "HOST:PORT"),
        (["--auth", "tokens"], "--http"),
        (["--token", "lmp_x"], "http://"),
        (["--http", "127.0.0.1:0", "--host", "a/b"], "not a host name"),
        (["--reveal", "some"], "'yes', 'no'"),
    ],
)
def test_options_that_are_not_safe_or_have_no_meaning_are_refused(tmp_path: Path, words: list[str], hint: str) -> None:
    done = Limpet(f"sqlite:///{tmp_path}/state.db")("mcp", *words)

    assert done.exit_code in (2, 7)
    assert hint in done.stderr
    assert not (tmp_path / "state.db").exists()


def test_a_store_that_cannot_be_reached_is_reported_at_once() -> None:
    done = Limpet("http://127.0.0.1:9")("mcp", "--token", "s3cret")

    assert done.exit_code == 6
    assert "s3cret" not in done.stderr


def test_an_interrupt_ends_it_though_its_input_is_still_open(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--url", f"sqlite:///{tmp_path}/state.db", "mcp"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        process.stdin.flush()
        assert b'"id":1' in process.stdout.readline()

        process.send_signal(signal.SIGINT)

        assert process.wait(30) == -signal.SIGINT
