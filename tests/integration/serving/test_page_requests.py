"""What the page asks a server for, and what it makes of every answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.responses import JSONResponse, Response

from tests.support.browser import PATIENCE, ScriptedServer, chromium, opened, result_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.thorough

A_MAN = ["A", " man", " plays."]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    scripted.answer = lambda asked: scripted.stream(asked, A_MAN)
    with scripted.running():
        yield scripted


@pytest.fixture
def page(browser: Browser, server: ScriptedServer) -> Iterator[Page]:
    with opened(browser, server.address) as found:
        yield found


def expect(found: Any) -> Any:
    from playwright.sync_api import expect

    return expect(found)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def write(page: Page, text: str) -> None:
    page.locator("#source").fill(text)


def test_the_translation_grows_and_is_announced_when_it_is_there(page: Page, server: ScriptedServer) -> None:
    target = page.locator("#target")
    server.allowed = 1
    write(page, "Ein Mann spielt.")
    expect(target).to_have_text("A")
    expect(target).to_have_attribute("aria-busy", "true")
    server.allowed = 2
    expect(target).to_have_text("A man")
    expect(page.locator("#live")).to_be_empty()
    server.allowed = 9
    expect(target).to_have_text("A man plays.")
    expect(target).to_have_attribute("aria-busy", "false")
    expect(page.locator("#live")).to_have_text("Translation: A man plays.")
    expect(page.locator("#speed")).to_contain_text("first token")
    [asked] = server.asked
    assert (asked["model"], asked["text"], asked["stream"], asked["token_scores"]) == (
        "de-en",
        "Ein Mann spielt.",
        True,
        True,
    )
    assert "attention" not in asked  # which this bundle does not tell


def test_a_key_that_is_pressed_cancels_what_it_outdates(page: Page, server: ScriptedServer) -> None:
    server.allowed = 1
    write(page, "Ein")
    expect(page.locator("#target")).to_have_text("A")
    page.locator("#source").press("End")
    page.locator("#source").press("e")
    until(lambda: server.left == ["Ein"])
    server.allowed = 9
    expect(page.locator("#target")).to_have_text("A man plays.")
    assert [asked["text"] for asked in server.asked] == ["Ein", "Eine"]


def test_escape_stops_and_control_enter_starts_again(page: Page, server: ScriptedServer) -> None:
    server.allowed = 1
    write(page, "Ein")
    expect(page.locator("#target")).to_have_text("A")
    page.locator("#source").press("Escape")
    until(lambda: server.left == ["Ein"])
    expect(page.locator("#target")).to_contain_text("Stopped.")
    server.allowed = 9
    page.locator("#source").press("Control+Enter")
    expect(page.locator("#target")).to_have_text("A man plays.")


def test_lines_are_requests_of_which_a_few_run_and_changed_ones_are_sent(page: Page, server: ScriptedServer) -> None:
    server.answer = lambda asked: server.stream(asked, [asked["text"].upper()])
    server.allowed = 0
    write(page, "a\nb\n\nc\nd\na")
    until(lambda: len(server.open) == 3)
    page.wait_for_timeout(200)
    assert len(server.asked) == 3
    server.allowed = 9
    expect(page.locator("#target .line")).to_have_text(["A", "B", "", "C", "D", "A"])
    assert sorted(asked["text"] for asked in server.asked) == ["a", "b", "c", "d"]
    expect(page.locator("#live")).to_have_text("Translated 5 lines.")
    write(page, "x\na\nb\n\nc")
    expect(page.locator("#target .line")).to_have_text(["X", "A", "B", "", "C"])
    assert [asked["text"] for asked in server.asked][4:] == ["x"]


def test_the_line_with_the_cursor_is_the_one_that_is_looked_into(page: Page, server: ScriptedServer) -> None:
    write(page, "a")
    expect(page.locator("#inspector-title")).to_have_text("Details")
    page.locator("#source").press("End")
    page.keyboard.type("\nb")
    expect(page.locator("#inspector-title")).to_have_text("Line 2 of 2")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#inspector-title")).to_have_text("Line 1 of 2")


def test_a_busy_server_is_asked_again_when_it_says_so(page: Page, server: ScriptedServer) -> None:
    busy = JSONResponse({"error": "the queue is full. Try again"}, 429, {"Retry-After": "1"})
    server.answer = lambda asked: busy if len(server.asked) == 1 else server.stream(asked, A_MAN)
    write(page, "Ein")
    expect(page.locator("#target")).to_contain_text("The queue is full. Try again. Next try in")
    expect(page.locator("#live")).to_have_text("The queue is full. Try again.")
    expect(page.locator("#target")).to_have_text("A man plays.")
    assert len(server.asked) == 2


def test_a_server_that_is_gone_is_said_to_be_and_asked_again(page: Page, server: ScriptedServer) -> None:
    expect(page.locator("#model")).to_have_value("de-en")
    page.route("**/v1/translate", lambda route: route.abort("connectionrefused"))
    write(page, "Ein")
    expect(page.locator("#target")).to_contain_text("The server does not answer.")
    page.unroute("**/v1/translate")
    expect(page.locator("#target")).to_have_text("A man plays.")


def test_a_connection_that_ends_in_the_middle_begins_anew(page: Page, server: ScriptedServer) -> None:
    server.answer = lambda asked: server.stream(asked, A_MAN, breaks=len(server.asked) == 1)
    write(page, "Ein")
    expect(page.locator("#target")).to_contain_text("ended in the middle")
    expect(page.locator("#target")).to_have_text("A man plays.")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (JSONResponse({"error": "beam is 0, below 1. Change it."}, 400), "Beam is 0, below 1. Change it."),
        (Response("<b>Bad Gateway</b>", 502), "The server answered with status 502."),
    ],
)
def test_what_is_refused_is_said_in_words_and_tried_on_request(
    page: Page, server: ScriptedServer, answer: Response, said: str
) -> None:
    server.answer = lambda asked: answer if len(server.asked) == 1 else server.stream(asked, A_MAN)
    write(page, "Ein")
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.locator("#target")).to_have_text("Not translated.")
    page.locator("#banner-button").click()
    expect(page.locator("#target")).to_have_text("A man plays.")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_line_that_cannot_be_read_says_so_where_it_stands(page: Page, server: ScriptedServer) -> None:
    refused = {"status": "too_long", "message": "65 ids, and the model reads 64", "hypotheses": []}
    server.answer = lambda asked: JSONResponse({"model": "de-en", "results": [refused]})
    write(page, "Ein")
    page.locator("#options-button").click()
    page.locator("#option-samples").fill("2")  # several outputs come without a stream
    page.locator("#option-samples").press("Tab")
    expect(page.locator("#target")).to_have_text("too_long: 65 ids, and the model reads 64")


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        # Bytes as characters: a whole word, a space alone, and half of an umlaut, which has no text of its own.
        (["\u0120gr\u00c3\u00b6\u00c3\u0141er", "\u0120", "\u00c3", "</s>"], ["größer", "␣", "\u00c3", "</s>"]),
        (["\u2581größer", "er"], ["größer", "er"]),
        (["größer", "Ãl"], ["größer", "Ãl"]),
    ],
    ids=["bytes", "sentencepiece", "words"],
)
def test_tokens_are_shown_as_text(page: Page, server: ScriptedServer, tokens: list[str], shown: list[str]) -> None:
    server.answer = lambda asked: server.stream(asked, tokens)
    write(page, "Ein")
    expect(page.locator("#target-tokens button")).to_have_text(shown)


def test_a_server_with_keys_gets_one_that_the_tab_alone_keeps(browser: Browser, server: ScriptedServer) -> None:
    server.key = "secret"
    with opened(browser, server.address) as page:
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        page.locator("#key-input").fill("wrong")
        page.locator("#key-input").press("Enter")
        expect(dialog).to_contain_text("This key is not known here.")
        page.locator("#key-input").fill("secret")
        page.locator("#key-input").press("Enter")
        write(page, "Ein")
        expect(page.locator("#target")).to_have_text("A man plays.")
        kept = page.evaluate("[{...sessionStorage}, {...localStorage}].map(JSON.stringify)")
        assert "secret" in kept[0]
        assert "secret" not in kept[1]


def test_what_a_model_writes_stays_text(page: Page, server: ScriptedServer) -> None:
    evil = '<img src="x" onerror="document.title = 1">'
    hypothesis = result_of([evil], source_tokens=[evil], source_text=[0, 1], attention=[[1.0]], token_log_probs=[-0.1])
    server.models = [{**server.models[0], "attention": True}]
    page.reload()
    server.answer = lambda asked: JSONResponse({"model": "de-en", "results": [hypothesis]})
    page.locator("#options-button").click()
    page.locator("#option-samples").fill("2")
    write(page, evil)
    expect(page.locator("#target")).to_have_text(evil)
    expect(page.locator("#source-tokens")).to_have_text(evil)
    page.locator("#target-tokens button").hover()
    expect(page.locator("#token-detail")).to_contain_text(evil)
    expect(page.locator("img")).to_have_count(0)
    assert page.title() == "tfexport"
