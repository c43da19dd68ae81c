"""The options of ``limpet mcp`` that are refused, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import Limpet


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
