"""The description of the addresses is complete, and its page needs no other server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from makers import applications
from tfexport.option import declared
from tfexport.search.options import SearchOptions


@pytest.fixture(scope="module")
def client(tiny_bundle: Path) -> Iterator[TestClient]:
    with applications.client({"de-en": tiny_bundle}) as found:
        yield found


@pytest.fixture(scope="module")
def described(client: TestClient) -> Any:
    return client.get("/openapi.json").json()


def test_every_reference_leads_somewhere(described: Any) -> None:
    schemas = described["components"]["schemas"]
    named = set(re.findall(r"#/components/schemas/(\w+)", str(described)))
    assert named <= schemas.keys()
    assert {"LibreRequest", "TranslateRequest"} <= named
    assert "HTTPValidationError" not in named


def test_every_option_of_a_search_is_a_field(described: Any) -> None:
    fields = described["components"]["schemas"]["TranslateRequest"]["properties"]
    assert declared(SearchOptions).keys() <= fields.keys()
    assert "unk_dictionary" not in fields


def test_operations_have_names_of_their_own(described: Any) -> None:
    names = [one["operationId"] for path in described["paths"].values() for one in path.values()]
    assert len(names) == len({*names})
    assert {"translate", "libre_translate", "score", "classify"} <= {*names}


def test_errors_are_described_everywhere(described: Any) -> None:
    for path, methods in described["paths"].items():
        for one in methods.values():
            if path not in ("/health", "/ready", "/v1/models"):
                assert {"400", "404", "422", "429", "503", "504"} <= one["responses"].keys(), path


def test_the_page_asks_no_other_server(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    links = re.findall(r"(?:src|href|url)[=:]\s*[\"']([^\"']+)", page.text)
    assert len(links) > 3
    assert all(link.startswith("/") and client.get(link).status_code == 200 for link in links)
