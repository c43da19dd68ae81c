"""`limpet token`: made, listed, rotated, revoked; and a secret that is shown once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.support import Limpet
from tests.engines import url_of

SCOPE = ("--namespace", "trivia", "--right", "read,write")


def create_token(run: Limpet, *words: str) -> tuple[str, str]:
    """The id and the secret of a new token."""
    result = run("token", "create", *words)
    assert result.exit_code == 0, result.stderr
    token = result.stdout.rstrip("\n")
    found = re.fullmatch(r"lmp_([0-9a-f]{12})_([0-9a-f]{64})", token)
    assert found is not None
    return found[1], found[2]


def test_a_token_is_printed_once_and_never_listed(run: Limpet, file: Path) -> None:
    id, secret = create_token(run, "ci", *SCOPE, "--prefix", "build/", "--expires", "90d")

    shown = run("token", "list").stdout
    assert shown.split("\t")[:2] == [id, "ci"]
    assert shown.rstrip("\n").endswith("trivia:build/:read,write")
    (document,) = run.documents("token", "list")
    assert document["scopes"] == [{"namespace": "trivia", "prefix": "build/", "rights": ["read", "write"]}]
    assert secret not in shown + str(document)
    assert secret.encode() not in b"".join(path.read_bytes() for path in file.parent.iterdir() if path.is_file())


def test_json_has_everything_and_the_token_where_it_is_made(run: Limpet) -> None:
    document = run.json("token", "create", "ci", *SCOPE)

    assert set(document) == {"id", "name", "scopes", "created_at", "expires_at", "former_until", "token"}
    assert document["token"].startswith(f"lmp_{document['id']}_")
    (listed,) = run.documents("token", "list")
    assert listed == {**{name: fact for name, fact in document.items() if name != "token"}, "expired": False}


def test_every_prefix_counts_in_every_namespace(run: Limpet) -> None:
    document = run.json(
        *("token", "create", "x", "-n", "a", "-n", "b", "--prefix", "p/", "--prefix", "q/"),
        *("--right", "read", "--right", "reveal,lock"),
    )

    assert [(one["namespace"], one["prefix"]) for one in document["scopes"]] == [
        *(("a", "p/"), ("a", "q/")),
        *(("b", "p/"), ("b", "q/")),
    ]
    assert document["scopes"][0]["rights"] == ["read", "lock", "reveal"]


def test_a_rotated_token_keeps_its_id_and_tells_how_long_both_count(run: Limpet) -> None:
    id, secret = create_token(run, "ci", *SCOPE)
    document = run.json("token", "rotate", id, "--grace", "10m")

    assert document["id"] == id
    assert secret not in document["token"]
    assert document["former_until"] > document["created_at"]
    assert run.json("token", "rotate", id, "--grace", "0")["former_until"] is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_token_is_revoked_by_its_id_or_by_itself(run: Limpet, whole: bool) -> None:
    id, secret = create_token(run, "ci", *SCOPE)

    assert run("token", "revoke", f"lmp_{id}_{secret}" if whole else id).exit_code == 0
    assert run("token", "list").stdout == ""
    assert run("token", "revoke", id).exit_code == 3


def test_a_secret_does_not_come_back_in_a_message(run: Limpet) -> None:
    id, secret = create_token(run, "ci", *SCOPE)
    run("token", "revoke", id)

    result = run("token", "revoke", f"lmp_{id}_{secret}")
    assert result.exit_code == 3
    assert f"no token '{id}'" in result.stderr
    assert secret not in result.output


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("x", "--right", "read"), 2),
        (("x", "-n", "a"), 2),
        (("x", "-n", "a", "--right", "root"), 2),
        (("x", "-n", "a", "--right", "read", "--expires", "soon"), 2),
        (("x", "-n", "a", "--right", "read", "--expires", "0"), 7),
        (("x", "-n", "limpet-server", "--right", "read"), 7),
        (("x", "-n", "tri*", "--right", "read"), 7),
        (("not a name", "-n", "a", "--right", "read"), 7),
    ],
)
def test_what_makes_no_token_says_why(run: Limpet, words: tuple[str, ...], code: int) -> None:
    result = run("token", "create", *words)

    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr


def test_a_namespace_before_the_command_would_be_without_effect(run: Limpet) -> None:
    result = run("--namespace", "a", "token", "create", "x", "-n", "b", "--right", "read")

    assert result.exit_code == 2
    assert "after create" in result.stderr


def test_a_question_makes_no_store(run: Limpet, file: Path) -> None:
    assert run("token", "list").exit_code == 3
    assert not file.exists()


@pytest.mark.parametrize("engine", ["postgres", "redis", "nats"])
def test_it_works_on_whatever_store_a_server_uses(engine: str, tmp_path: Path) -> None:
    run = Limpet(url_of(engine, tmp_path))
    id, _ = create_token(run, "ci", *SCOPE)

    assert id in [document["id"] for document in run.documents("token", "list")]
    assert run("token", "revoke", id).exit_code == 0
