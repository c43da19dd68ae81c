"""``limpet index``: which fields are kept in order."""

from __future__ import annotations

from tests.cli.support import Limpet


def test_the_command_makes_lists_and_drops(run: Limpet) -> None:
    run("put", "key", "1")
    assert run("index").stderr == "no field has an index\n"
    run("index", "updated_at")
    run("index", "état")

    assert run("index").stdout == "updated_at\nétat\n"
    assert run("index", "--json").stdout == '{"field":"updated_at"}\n{"field":"état"}\n'

    run("index", "état", "--drop")
    assert run("index").stdout == "updated_at\n"


def test_the_command_says_what_it_cannot_do(run: Limpet) -> None:
    run("put", "key", "1")
    assert "limpet index FIELD --drop" in run("index", "--drop").stderr
    assert "quotation mark" in run("index", 'a"b').stderr
