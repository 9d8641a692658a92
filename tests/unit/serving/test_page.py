"""The page comes with what keeps it safe and current, names nothing on other servers, and can be left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.support.html import Checked
from tfexport.serving.app import create_app
from tfexport.serving.catalog import Catalog, HowToLoad
from tfexport.serving.options import ServerOptions
from tfexport.serving.page.routes import FOLDER, add_page

FILES = sorted(FOLDER.iterdir())
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
EMPTY = Catalog([], HowToLoad())
NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    add_page(app)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/", *(f"/page/{file.name}" for file in FILES)])
def test_files_come_with_their_type_and_a_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith(TYPES[Path(path).suffix or ".html"])
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-cache"


def test_a_file_that_did_not_change_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/main.js")
    again = client.get("/page/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_nothing_but_the_files_of_the_page_is_sent(client: TestClient) -> None:
    assert client.get("/page/").status_code == 404
    for path in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "//etc/passwd"):
        assert client.get(f"/page/{path}").status_code == 404


def test_the_page_is_no_part_of_the_api(client: TestClient) -> None:
    assert client.get("/openapi.json").json()["paths"] == {}


def test_a_server_may_have_no_page() -> None:
    with_page, without = (create_app(EMPTY, ServerOptions(page=page)) for page in (True, False))
    assert TestClient(with_page).get("/").status_code == 200
    assert TestClient(without).get("/").status_code == 404
    assert TestClient(without).get("/page/main.js").status_code == 404


def test_the_form_of_options_has_headings_and_defaults() -> None:
    schema = create_app(EMPTY).openapi()["components"]["schemas"]["TranslateRequest"]["properties"]
    assert schema["beam"]["x-default"] == 1
    assert schema["beam"]["x-panel"] == "Search"
    assert schema["length_penalty"]["x-default"] == "of the profile; 0.6"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_need_no_other_server(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace(f'xmlns="{NAMESPACE}"', "")
    comments = re.compile(r"^\s*//.*$", re.MULTILINE)
    assert not re.search(r"https?://|//\w+\.", comments.sub("", text))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_text_is_never_read_as_html_and_nothing_is_inline(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    if file.suffix == ".html":
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src=)", text)


def test_the_page_is_well_formed_and_its_scripts_find_their_elements() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    checked = Checked()
    checked.feed(page)
    assert checked.open == []
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    scripts = "".join(file.read_text(encoding="utf-8") for file in FILES if file.suffix == ".js")
    assert set(re.findall(r'(?:byId|onClick)\("([^"]+)"', scripts)) <= set(ids)
    named = re.findall(r'(?:for|aria-labelledby|aria-describedby|aria-controls)="([^"]+)"', page)
    assert set(named) <= set(ids)
