"""A client that a generator makes from the server's OpenAPI document works without a change."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest

from tests.server.http_support import in_thread

NAME = "limpet_generated_client"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_thread() as found:
        yield found


@pytest.fixture(scope="module")
def generated(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The package that openapi-python-client makes of what the server says of itself."""
    folder = tmp_path_factory.mktemp("generated")
    document = httpx2.get(f"{url}/openapi.json", headers={"Authorization": "Bearer root"}, timeout=60)
    (folder / "openapi.json").write_text(json.dumps(document.raise_for_status().json()))
    # It formats what it has made with ruff, which is beside it.
    programs = Path(sys.executable).parent
    done = subprocess.run(
        [
            programs / "openapi-python-client",
            "generate",
            "--path",
            "openapi.json",
            "--output-path",
            NAME,
            "--meta=none",
        ],
        cwd=folder,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout, "the generator left something out:\n" + done.stdout
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(NAME)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def client(generated: ModuleType, url: str) -> Iterator[Any]:
    with generated.AuthenticatedClient(base_url=url, token="root", timeout=60.0) as made:
        yield made


def verb(name: str) -> Any:
    return importlib.import_module(f"{NAME}.api.default.{name}").sync_detailed


# Not null by itself: httpx, which the generated code uses, sends no body for it.
@pytest.mark.parametrize("value", [{"turn": "alice"}, [1, None, "x"], "text", 3, 1.5, True])
def test_it_puts_and_gets_json(client: Any, value: object) -> None:
    put = verb("put_entry")("shop", "game/1", client=client, body=value)
    assert put.status_code in (200, 201)
    assert put.parsed.key == "game/1"

    got = verb("get_entry")("shop", "game/1", client=client)
    assert (got.status_code, got.parsed) == (200, value)


def test_it_puts_and_gets_bytes(client: Any, generated: ModuleType) -> None:
    blob = bytes(range(256))
    file = importlib.import_module(f"{NAME}.types").File(payload=BytesIO(blob))
    put = verb("put_bytes")("shop", "blob", client=client, body=file)
    assert put.status_code == 201
    assert put.parsed.kind == "bytes"

    got = verb("get_bytes")("shop", "blob", client=client)
    assert got.parsed.payload.read() == blob

    verb("put_entry")("shop", "plain", client=client, body=1)
    wrong = verb("get_bytes")("shop", "plain", client=client)
    assert wrong.parsed.code == "type_mismatch"


def test_it_puts_and_patches_a_record(client: Any, generated: ModuleType) -> None:
    models = importlib.import_module(f"{NAME}.models")
    put = verb("put_record")("shop", "job/7", client=client, body=models.PutRecordBody.from_dict({"state": "new"}))
    assert (put.status_code, put.parsed.kind) == (201, "record")

    patch = models.Patch.from_dict({"set": {"state": "claimed"}})
    assert verb("patch_record")("shop", "job/7", client=client, body=patch).status_code == 200
    fields = verb("get_record")("shop", "job/7", client=client)
    assert fields.parsed.to_dict() == {"state": "claimed"}


def test_a_guard_that_fails_is_an_answer(client: Any) -> None:
    verb("put_entry")("shop", "theme", client=client, body="dark")
    refused = verb("put_entry")("shop", "theme", client=client, body="light", if_match='"1000000"')

    assert refused.status_code == 412
    assert refused.parsed.code == "conflict"
