"""The description of HTTP: it is valid, it is complete, and the server does what it says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from limpet.server.http_routes import ENDPOINTS
from limpet.server.openapi import describe
from limpet.server.operations import OPERATIONS
from tests.docs_support import ROOT
from tests.server.http_support import in_thread

DOCUMENT = describe(ENDPOINTS)
LONG = bool(os.environ.get("LIMPET_FUZZ_LONG"))
EXAMPLES = 2000 if LONG else 25
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]

described = schemathesis.openapi.from_dict(DOCUMENT)
# Beside random requests, one for each way of breaking each rule: thousands.
described.config.phases.coverage.enabled = LONG
# A stream has no end that could be waited for; tests of its own ask for it.
fuzzed = described.exclude(path_regex="/watch$")


def test_the_description_is_valid() -> None:
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []


def test_every_route_is_described() -> None:
    described_routes = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}

    assert {(one.method, re.sub(r":\w+}", "}", one.path)) for one in ENDPOINTS} <= described_routes


def test_every_route_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    routes = page.partition("\n## The routes\n")[2].partition("\n## ")[0]
    described_routes = re.findall(r"^\| `([A-Z]+) (/[^`?]*)", routes, re.MULTILINE)

    assert sorted(described_routes) == sorted(
        (one.method, re.sub(r":\w+}", "}", one.path).removeprefix("/v1/{namespace}")) for one in ENDPOINTS
    )


def test_every_code_of_http_alone_is_in_the_reference() -> None:
    folder = ROOT / "src/limpet/server"
    raised = {code for path in folder.glob("*.py") for code in re.findall(r'Problem\(\d+, "(\w+)"', path.read_text())}
    page = (ROOT / "docs/reference/http.md").read_text()

    assert {code for code in raised if f"`{code}`" not in page} == set()


def test_every_shape_of_a_request_is_described() -> None:
    shapes = {operation.request.__name__ for operation in OPERATIONS.values()}

    assert shapes <= set(DOCUMENT["components"]["schemas"])


def test_names_are_distinct() -> None:
    names = [one["operationId"] for methods in DOCUMENT["paths"].values() for one in methods.values()]

    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_thread() as found:
        yield found


@pytest.mark.slow
@pytest.mark.unmeasured
@fuzzed.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
def test_the_server_does_what_the_description_says(case: schemathesis.Case[Any], url: str) -> None:
    headers = {"Authorization": "Bearer root"}
    if isinstance(case.body, dict):
        case.body.pop("wait", None)  # A lock that was taken before would be waited for.
    case.call_and_validate(base_url=url, headers=headers, checks=CHECKS, timeout=60)
