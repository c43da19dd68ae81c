"""``limpet txn``: several writes from a file, all or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import Limpet


@pytest.fixture
def transfer(tmp_path: Path) -> Path:
    return tmp_path / "transfer.json"


def write(path: Path, **members: Any) -> str:
    path.write_text(json.dumps(members))
    return str(path)


def test_all_writes_happen_and_taken_values_are_printed(run: Limpet, transfer: Path) -> None:
    run("put", "old", '{"n": 1}')
    writes = [{"op": "put", "key": "new", "value": 2}, {"op": "take", "key": "old"}, {"op": "take", "key": "none"}]

    assert run("txn", write(transfer, writes=writes)).stdout == '{"n":1}\nnull\n'

    assert run("ls", "--values").stdout == "new\t2\n"


def test_no_write_happens_where_a_guard_does_not_hold(run: Limpet, transfer: Path) -> None:
    run("put", "plan", "1")
    guards = [{"key": "plan", "expect": {"version": 7}}]

    result = run("txn", write(transfer, guards=guards, writes=[{"op": "delete", "key": "plan"}]))

    assert result.exit_code == 4
    assert "expected version 7, found version 1" in result.stderr
    assert run("get", "plan").stdout == "1\n"


def test_it_is_read_from_standard_input_and_a_retry_happens_once(run: Limpet) -> None:
    document = json.dumps({"writes": [{"op": "add", "key": "runs", "by": 1}]})

    replayed = [
        json.loads(run("--json", "txn", "-", "--request-id", "once", stdin=document).stdout)["replayed"]
        for _ in range(2)
    ]

    assert replayed == [False, True]
    assert run("get", "runs").stdout == "1\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "JSON"),
        ('{"writes": [{"op": "burn", "key": "k"}]}', "$.writes[0].op"),
        ('{"write": []}', "unknown member"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(run: Limpet, transfer: Path, text: str, problem: str) -> None:
    transfer.write_text(text)

    result = run("txn", str(transfer))

    assert result.exit_code == 7
    assert problem in result.stderr


def test_one_request_id_is_enough(run: Limpet, transfer: Path) -> None:
    result = run("txn", write(transfer, writes=[], request_id="a"), "--request-id", "b")

    assert result.exit_code == 7
    assert "give one of them" in result.stderr
