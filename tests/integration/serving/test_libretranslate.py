"""LibreTranslate's addresses: shapes of answers and errors, and its own client."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from libretranslatepy import LibreTranslateAPI

import tfexport
from makers import applications
from makers.servers import serving

LINES = ["de5 de9 de7", "de11 de4", "de20 de8 de6 de13"]


@pytest.fixture(scope="module")
def client(quantized_bundle: Path) -> Iterator[TestClient]:
    bundles = {
        "de-en": quantized_bundle,
        "pt_BR-fr": quantized_bundle,
        "nl-fr": quantized_bundle,
        "x1": quantized_bundle,
    }
    with applications.client(bundles, slots=16) as found:
        yield found


@pytest.fixture(scope="module")
def alone(quantized_bundle: Path) -> Any:
    model = tfexport.load(quantized_bundle, threads=1)
    return lambda text, **options: model.translate(text, **options)


def ask(client: TestClient, **fields: Any) -> Any:
    found = client.post("/translate", json={"source": "de", "target": "en", **fields})
    assert found.status_code == 200, found.text
    return found.json()


def refused(client: TestClient, **fields: Any) -> str:
    given = {"q": LINES[0], "source": "de", "target": "en", **fields}
    found = client.post("/translate", json={name: value for name, value in given.items() if value is not None})
    assert found.status_code == 400, found.text
    assert list(found.json()) == ["error"]
    return str(found.json()["error"])


def test_a_text_and_several(client: TestClient, alone: Any) -> None:
    assert ask(client, q=LINES[0]) == {"translatedText": alone(LINES[0]).text}
    assert ask(client, q=LINES) == {"translatedText": [alone(line).text for line in LINES]}


def test_lines_keep_their_place(client: TestClient, alone: Any) -> None:
    one, two, three = (alone(line).text for line in LINES)
    text = f"\n  {LINES[0]}\r\n\n{LINES[1]} \n{LINES[2]}\n"
    assert ask(client, q=text)["translatedText"] == f"\n  {one}\r\n\n{two} \n{three}\n"


def test_forms_and_addresses_have_the_same_fields(client: TestClient, alone: Any) -> None:
    fields = {"q": LINES[0], "source": "de", "target": "en", "format": "text", "api_key": "", "alternatives": "0"}
    wanted = {"translatedText": alone(LINES[0]).text}
    assert client.post("/translate", data=fields).json() == wanted
    assert client.post("/translate", data=fields, files={"unread": b""}).json() == wanted
    assert client.post("/translate", params=fields).json() == wanted


def test_forms_are_utf_8_with_or_without_escapes(client: TestClient, alone: Any) -> None:
    words = {"Content-Type": "application/x-www-form-urlencoded"}
    text = f"{LINES[0]} läuft"
    wanted = {"translatedText": alone(text).text}
    for q in (text.encode(), quote(text).encode()):
        assert client.post("/translate", content=b"q=" + q + b"&source=de&target=en", headers=words).json() == wanted
    refused = client.post("/translate", content=b"q=l\xe4uft&source=de&target=en", headers=words)
    assert refused.status_code == 400
    assert "Send it in UTF-8" in refused.json()["error"]


def test_several_texts_of_a_form_are_all_translated(client: TestClient, alone: Any) -> None:
    fields = {"q": LINES, "source": "de", "target": "en"}
    wanted = {"translatedText": [alone(line).text for line in LINES]}
    assert client.post("/translate", data=fields).json() == wanted
    assert client.post("/translate", data=fields, files={"unread": b""}).json() == wanted
    assert client.post("/translate", params=fields).json() == wanted
    twice = client.post("/translate", data={**fields, "target": ["en", "fr"]})
    assert (twice.status_code, "several target" in twice.json()["error"]) == (400, True)


def test_alternatives_are_the_next_of_a_beam(client: TestClient, alone: Any) -> None:
    found = alone(LINES[2], beam=4, nbest=4).hypotheses
    texts = list(dict.fromkeys(one.text for one in found))
    assert ask(client, q=LINES[2], alternatives=3) == {"translatedText": texts[0], "alternatives": texts[1:]}
    assert ask(client, q=[LINES[2]], alternatives=3) == {"translatedText": texts[:1], "alternatives": [texts[1:]]}
    assert "16" in refused(client, alternatives=16)


def test_html_keeps_tags(client: TestClient, alone: Any) -> None:
    one, two, _ = (alone(line).text for line in LINES)
    html = f'<p class="b a">{LINES[0]} <b>{LINES[1]}</b>&amp;<code>de4</code></p>'
    wanted = f'<p class="b a">{one} <b>{two}</b>&amp;<code>de4</code></p>'
    assert ask(client, q=html, format="html") == {"translatedText": wanted}
    assert "32,768" in refused(client, q="<p>" * 20000, format="html")
    assert "262,144" in refused(client, q="a" * 262_145)
    assert "9,000 sentences, above 8,192" in refused(client, q="Aa. " * 9000)


def test_the_source_is_found_where_there_is_one(client: TestClient) -> None:
    detected = {"confidence": 0.0, "language": "de"}
    assert ask(client, q=LINES[0], source="auto")["detectedLanguage"] == detected
    assert ask(client, q=LINES[:2], source="auto")["detectedLanguage"] == [detected] * 2
    assert "Give the source: pt-BR, nl" in refused(client, source="auto", target="fr")
    assert "not a target language" in refused(client, source="auto", target="de")
    assert ask(client, q=LINES[0], source="pt-BR", target="fr")
    assert ask(client, q=LINES[0], source="pt_BR", target="fr")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"q": None}, "missing q parameter"),
        ({"q": ""}, "missing q parameter"),
        ({"source": None}, "missing source parameter"),
        ({"target": ""}, "missing target parameter"),
        ({"format": "pdf"}, "pdf format is not supported"),
        ({"alternatives": "many"}, "alternatives"),
        ({"alternatives": -1}, "alternatives"),
        ({"q": 5}, "q: "),
        ({"source": "xx"}, "xx is not supported"),
        ({"source": "de", "target": "fr"}, r"French \(fr\) is not available as a target language from German \(de\)"),
        (
            {"q": f"{LINES[0]}\n\nde5 <pad>"},
            "^characters 13 to 22, 'de5 <pad>' cannot be translated: it has the padding id",
        ),
        ({"q": [LINES[0], "de5 <pad>"]}, "^q.1, characters 0 to 9, 'de5 <pad>'"),
        ({"q": f"<p>{LINES[0]}</p>de5 &lt;pad>", "format": "html"}, "'de5 <pad>' cannot"),
    ],
)
def test_what_cannot_be_translated_is_an_error(client: TestClient, fields: dict[str, Any], error: str) -> None:
    assert re.search(error, refused(client, **fields)), refused(client, **fields)


def test_long_texts_are_split_and_cut(client: TestClient, alone: Any) -> None:
    split = " ".join(alone(f"{line.title()}.").text for line in LINES[:2])
    assert ask(client, q=" ".join(f"{line.title()}." for line in LINES[:2]))["translatedText"] == split
    pieces = ask(client, q=f"de5 {'de6 ' * 60}")["translatedText"]
    assert len(pieces) > len(alone("de6 " * 10).text)


@pytest.fixture(scope="module")
def aligned_client(aligned_bundle: Path) -> Iterator[TestClient]:
    with applications.client({"de-en": aligned_bundle}, slots=16) as found:
        yield found


def test_with_attention_sentences_of_html_are_whole(aligned_client: TestClient, aligned_bundle: Path) -> None:
    html = "<p>de5 <b>de9 de7</b> <code>de4</code> de11</p>"
    model = tfexport.load(aligned_bundle, threads=1)
    wanted = model.translate_document(html, markup="html", language="de")
    assert [one.source for one in wanted.sentences] == ["de5 de9 de7 de4 de11"]
    assert ask(aligned_client, q=html, format="html") == {"translatedText": wanted.text}


def test_damaged_bodies_are_errors(client: TestClient) -> None:
    for body in (b"{", b"[]", b"\xff", b'{"q": "\\ud800", "source": "de", "target": "en"}', b"[" * 10**5):
        found = client.post("/translate", content=body, headers={"Content-Type": "application/json"})
        assert found.status_code == 400, found.text
    wrong = {"Content-Type": "multipart/form-data; boundary=x"}
    assert client.post("/translate", content=b"nothing", headers=wrong).status_code == 400
    assert "Content-Type: application/json" in client.post("/translate", content=b"{}").json()["error"]


def test_languages_detection_and_settings(client: TestClient) -> None:
    found = {one["code"]: one for one in client.get("/languages").json()}
    assert found["pt-BR"] == {"code": "pt-BR", "name": "Portuguese (Brazil)", "targets": ["fr"]}
    assert found["fr"] == {"code": "fr", "name": "French", "targets": []}
    assert client.post("/detect", json={"q": "x"}).status_code == 400
    assert client.post("/detect", json={}).json()["error"].startswith("Invalid request: missing q parameter")
    settings = client.get("/frontend/settings").json()
    assert (settings["charLimit"], settings["language"]["source"]) == (262_144, {"code": "de", "name": "German"})


@pytest.fixture(scope="module")
def address(quantized_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server") / "log", f"de-en={quantized_bundle}") as running:
        yield running.url


def test_the_command_of_the_documentation_works(address: str, alone: Any) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/serve-api.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^curl localhost:8080/translate .*$", page, re.MULTILINE)
    given = shlex.split(command.replace("localhost:8080", address))
    answer = subprocess.run([given[0], "-sS", *given[1:]], capture_output=True, check=True, timeout=60)
    assert json.loads(answer.stdout) == {"translatedText": alone("Ein Hund läuft.").text}


def test_its_own_client_works(address: str, alone: Any) -> None:
    theirs = LibreTranslateAPI(address)
    assert theirs.translate("\n".join(LINES), "de", "en") == "\n".join(alone(line).text for line in LINES)
    assert theirs.languages() == [
        {"code": "de", "name": "German", "targets": ["en"]},
        {"code": "en", "name": "English", "targets": []},
    ]
    assert theirs.detect("de5") == [{"confidence": 0.0, "language": "de"}]


def test_curl_works(address: str, alone: Any) -> None:
    flags = ["-d", f"q={LINES[0]}", "-d", "source=de", "-d", "target=en"]
    found = subprocess.run(["curl", "-sS", f"{address}/translate", *flags], capture_output=True, text=True, timeout=60)
    assert found.stdout == '{"translatedText":"' + alone(LINES[0]).text + '"}'
