"""The key standard: what a key may be, the errors of one that is not, and hashes of identifiers that do not fit."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet import errors
from limpet.protocol.codes import code_of
from limpet.semantic.keys import KEY_MAX, InvalidKeyField, check_key, check_prefix, component_of, join

START = "tenant/acme/project/docs/"


@pytest.mark.parametrize(
    "key",
    [
        "tenant/acme/project/docs/onedrive/delta",
        "tenant/acme/project/docs/code/limpet.core/last_sha",
        "tenant/1/project/2/search/index/main-v2/version",
        "tenant/a@b.c/project/x~y/z:1+2=3",
        START + "x" * (KEY_MAX - len(START)),
    ],
)
def test_a_key_names_tenant_and_project_and_goes_on(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("", "key"),
        ("docs/onedrive", "key"),
        ("Tenant/acme/project/docs/x", "key"),
        ("tenant/acme/team/docs/x", "key"),
        ("tenant", "tenant"),
        ("tenant//project/docs/x", "tenant"),
        ("tenant/Acme/project/docs/x", "tenant"),
        ("tenant/ac me/project/docs/x", "tenant"),
        ("tenant/acme/project", "project"),
        ("tenant/acme/project/Docs/x", "project"),
        ("tenant/acme/project//x", "project"),
        ("tenant/acme/project/docs", "path[0]"),
        (START, "path[0]"),
        (START + "A", "path[0]"),
        (START + "a//b", "path[1]"),
        (START + "a/b/../c", "path[2]"),
        (START + "a/b c", "path[1]"),
        (START + "a/b\t", "path[1]"),
        (START + "a/é", "path[1]"),
        (START + "a/*", "path[1]"),
        (START + "a/b/", "path[2]"),
        (START + "x" * (KEY_MAX - len(START) + 1), "key"),
        (7, "key"),
        (None, "key"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_of_the_part_that_is_wrong(key: object, field: str) -> None:
    with pytest.raises(InvalidKeyField) as refused:
        check_key(key)

    assert refused.value.field == field
    assert isinstance(refused.value, errors.InvalidKey)
    assert refused.value.to_dict()["field"] == field
    assert refused.value.to_dict()["code"] == "invalid_key"
    assert code_of(refused.value).status == 400


def test_a_prefix_is_whole_components() -> None:
    assert check_prefix("tenant/acme/") == "tenant/acme/"
    assert check_prefix(START + "a/") == START + "a/"
    for prefix in ("", "/", "tenant/", "tenant/acme", "tenant/acme/pro", "tenant/acme/project/", START + "A/", 5):
        with pytest.raises(InvalidKeyField):
            check_prefix(prefix)


def test_a_short_identifier_stands_for_itself_and_others_are_hashed_as_documented() -> None:
    assert component_of("onedrive") == "onedrive"
    assert component_of("x" * 64) == "x" * 64
    for identifier in ("x" * 65, "Drive 7", "a/b", "é", ".", component_of("Drive 7")):
        found = component_of(identifier)

        # 25 digits of base 32 are 125 bits of SHA-256, written out here by hand.
        bits = int.from_bytes(hashlib.sha256(identifier.encode()).digest()) >> (256 - 125)
        digits = "".join("abcdefghijklmnopqrstuvwxyz234567"[bits >> (5 * place) & 31] for place in reversed(range(25)))
        assert found == f"h-{digits}"


@given(st.lists(st.text(min_size=1, max_size=200), min_size=3, max_size=5))
def test_every_identifier_has_a_place_in_a_key(identifiers: list[str]) -> None:
    try:
        key, hashed = join(*identifiers)
    except InvalidKeyField as refused:
        assert "surrogate" in str(refused) or len(identifiers) == 5  # noqa: PT017
        return

    assert check_key(key) == key
    components = re.split("/", key)
    found = [components[1], components[3], *components[4:]]
    assert [hashed.get(component, component) for component in found] == identifiers


def test_the_longest_is_hashed_first_when_a_key_is_too_long() -> None:
    key, hashed = join("acme", "docs", "a" * 50, "b" * 40, "c" * 20)

    assert key == "/".join(["tenant/acme/project/docs", *hashed, "b" * 40, "c" * 20])
    assert list(hashed.values()) == ["a" * 50]
    with pytest.raises(InvalidKeyField):
        join("acme", "docs", *["d" * 20] * 8)
    with pytest.raises(InvalidKeyField, match="project"):
        join("acme", "", "x")
