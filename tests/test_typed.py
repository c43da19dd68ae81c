"""Typed views of pydantic models. Those of dataclasses and structs are in the conformance suite."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pydantic
import pydantic.dataclasses
import pytest

import limpet
from limpet.errors import InvalidValue, TypeMismatch

SECRET = "hunter2"


class Item(pydantic.BaseModel):
    name: str
    price: int = pydantic.Field(alias="unitPrice", ge=0)
    seen: datetime | None = None

    @pydantic.field_validator("name")
    @classmethod
    def refuse(cls, name: str) -> str:
        if SECRET in name:
            raise ValueError(f"{name} is not allowed")
        return name


class Cart(pydantic.BaseModel, strict=True):
    items: list[Item] = []
    codes: dict[str, bytes] = {}


@pydantic.dataclasses.dataclass
class Point:
    x: int
    y: int


@pytest.fixture
def store() -> Any:
    with limpet.sync.open("memory:") as opened:
        yield opened


def test_models_come_back_as_they_were_put(store: limpet.sync.Store) -> None:
    carts, points = store.typed(Cart, "cart/"), store.typed(Point, "point/")
    cart = Cart(items=[Item(name="tea", unitPrice=3, seen=datetime(2026, 1, 2, tzinfo=UTC))], codes={"a": b"x"})

    put = carts.put("1", cart)
    points.put("a", Point(1, 2))

    assert carts.get("1") == put.value == cart
    assert points.get("a") == Point(1, 2)
    assert store.get("cart/1")["items"] == [{"name": "tea", "unitPrice": 3, "seen": "2026-01-02T00:00:00Z"}]


def test_a_record_is_read_as_a_model(store: limpet.sync.Store) -> None:
    store.record("item/1").put({"name": "tea", "unitPrice": 3})

    assert store.typed(Item, "item/").get("1") == Item(name="tea", unitPrice=3)


@pytest.mark.parametrize(
    ("stored", "path"),
    [
        ({"items": [{"name": "tea", "unitPrice": SECRET}]}, "$.items[0].unitPrice"),
        ({"items": [{"name": SECRET, "unitPrice": 1}]}, "$.items[0].name"),
        (SECRET, "$"),
        (SECRET.encode(), "$"),
    ],
)
def test_what_does_not_fit_is_told_and_not_shown(store: limpet.sync.Store, stored: Any, path: str) -> None:
    store.put("cart/1", stored)

    with pytest.raises(TypeMismatch) as refused:
        store.typed(Cart, "cart/").get("1")

    assert (refused.value.key, refused.value.path, refused.value.code) == ("cart/1", path, "type_mismatch")
    assert path in str(refused.value)
    assert SECRET not in str(refused.value)
    assert refused.value.__suppress_context__


@pytest.mark.filterwarnings("error")
def test_what_would_not_come_back_is_not_put(store: limpet.sync.Store) -> None:
    items = store.typed(Item, "item/")
    wrong = Item.model_construct(name="tea", price=SECRET)

    with pytest.raises(InvalidValue) as refused:
        items.put("1", wrong)

    assert (refused.value.key, refused.value.path) == ("item/1", "$.unitPrice")
    assert SECRET not in str(refused.value)
    assert store.entry("item/1") is None


def test_pydantic_is_imported_only_for_its_models() -> None:
    program = (
        "import dataclasses, sys, limpet\n"
        "Point = dataclasses.make_dataclass('Point', [('x', int)])\n"
        "with limpet.sync.open('memory:') as store: store.typed(Point).put('a', Point(1))\n"
        "assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
