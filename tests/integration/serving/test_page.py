"""A person tries bundles on the page of `tfexport serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from makers.processes import ENVIRONMENT, TFEXPORT
from tests.support.browser import PATIENCE, chromium, free_port, opened
from tfexport.api.model import load

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.thorough

TEXT = "de5 de6 de7\n\nde9 de10"
LINES = TEXT.split("\n")
OPTIONS = {"beam": 4, "nbest": 3, "min_length": 5, "attention": True}
"""Of the page; without `min_length` outputs of this model have a token or two."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def address(aligned_bundle: Path, tiny_bundle: Path) -> Iterator[str]:
    """Of a server with a pair of languages in both directions, of which one tells attention."""
    port = free_port()
    command = [TFEXPORT, "serve", f"de-en={aligned_bundle}", f"en-de={tiny_bundle}", "--port", str(port)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    found, end = f"http://127.0.0.1:{port}/", time.monotonic() + 2 * PATIENCE
    try:
        while not _is_ready(found):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        yield found
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(PATIENCE)


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    kept = [{"name": "tfexport.options", "value": json.dumps(OPTIONS)}]
    state = {"cookies": [], "origins": [{"origin": address.rstrip("/"), "localStorage": kept}]}
    with opened(browser, address, color_scheme="light", storage_state=state) as found:
        yield found


@pytest.fixture(scope="module")
def expected(aligned_bundle: Path) -> list[Any]:
    """What Python gives for each line that is not empty."""
    with load(aligned_bundle, threads=1) as model:
        return [model.translate(line, token_scores=True, **OPTIONS).hypotheses for line in LINES if line]


def expect(found: Any) -> Any:
    from playwright.sync_api import expect

    return expect(found)


def log_of(output: Any, index: int) -> str:
    """As the page writes it."""
    return f"(log {output.token_log_probs[index]:.4f})".replace("-", "\N{MINUS SIGN}")


def translated(page: Page, expected: list[Any]) -> None:
    page.locator("#source").fill(TEXT)
    expect(page.locator("#target .line")).to_have_text([expected[0][0].text, "", expected[1][0].text])


def test_lines_languages_and_a_hypothesis_that_is_chosen(page: Page, expected: list[Any]) -> None:
    translated(page, expected)
    assert page.locator("#source").get_attribute("lang") == "de"
    assert page.locator("#target").get_attribute("lang") == "en"
    expect(page.locator("#target-label")).to_have_text("English")
    page.locator("#source").press("Control+Home")
    expect(page.locator("#inspector-title")).to_have_text("Line 1 of 3")
    first, last = page.locator("#target .line").first, page.locator("#target .line").last
    expect(page.get_by_role("radio")).to_have_count(3)
    page.get_by_role("radio").nth(1).check()
    expect(first).to_have_text(expected[0][1].text)
    expect(page.locator("#target-tokens button")).to_have_count(len(expected[0][1].tokens))
    page.locator("#source").press("Alt+ArrowDown")
    expect(first).to_have_text(expected[0][2].text)
    page.get_by_role("button", name="Next line").click()
    expect(page.locator("#inspector-title")).to_have_text("Line 3 of 3")
    page.get_by_role("radio").nth(2).check()
    expect(last).to_have_text(expected[1][2].text)
    expect(first).to_have_text(expected[0][2].text)


def test_probability_and_attention_by_mouse_and_keyboard(page: Page, expected: list[Any]) -> None:
    translated(page, expected)
    page.locator("#source").press("Control+Home")
    best, tokens = expected[0][0], page.locator("#target-tokens button")
    sources, detail = page.locator("#source-tokens button"), page.locator("#token-detail")
    expect(sources).to_have_count(len(best.source_tokens))

    def weights() -> list[float]:
        return sources.evaluate_all("all => all.map(one => Number(one.style.getPropertyValue('--weight')))")

    tokens.nth(1).hover()
    expect(detail).to_contain_text(log_of(best, 1))
    assert weights() == pytest.approx(best.attention[1].tolist())
    expect(sources.first).to_have_class("token special shaded")
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(2)).to_be_focused()
    expect(detail).to_contain_text(log_of(best, 2))
    assert weights() == pytest.approx(best.attention[2].tolist())
    page.keyboard.press("Shift+Tab")  # one stop for all tokens of a row
    expect(sources.first).to_be_focused()
    expect(detail).to_contain_text("gets most attention from")
    assert tokens.nth(0).evaluate("one => one.style.getPropertyValue('--weight')") == str(float(best.attention[0][0]))
    tokens.nth(1).click()
    page.locator("#source").focus()
    page.mouse.move(0, 0)
    expect(tokens.nth(1)).to_have_attribute("aria-pressed", "true")
    expect(detail).to_contain_text(log_of(best, 1))


def test_languages_swap_and_a_bundle_without_attention_says_so(page: Page, expected: list[Any]) -> None:
    translated(page, expected)
    expect(page.locator("#no-attention")).to_be_hidden()
    page.get_by_role("button", name="Swap languages").click()
    expect(page.locator("#model")).to_have_value("en-de")
    expect(page.locator("#source")).to_have_value("\n".join([expected[0][0].text, "", expected[1][0].text]))
    expect(page.locator("#no-attention")).to_be_visible()
    expect(page.locator("#source-tokens")).to_be_hidden()
    page.locator("#target-tokens button").first.focus()
    expect(page.locator("#token-detail")).to_contain_text("probability")
    page.reload()
    expect(page.locator("#model")).to_have_value("en-de")


def test_options_are_those_of_the_server_and_samples_need_no_other_change(page: Page, expected: list[Any]) -> None:
    translated(page, expected)
    page.locator("#options-button").click()
    page.locator("#option-samples").fill("2")
    page.locator("#option-samples").press("Tab")
    expect(page.locator("#option-beam")).to_be_disabled()
    expect(page.locator("#option-temperature")).to_be_enabled()
    expect(page.get_by_role("radio")).to_have_count(2)
    page.locator("#option-samples").fill("-1")
    page.locator("#option-samples").press("Tab")
    expect(page.locator("#option-samples-help")).to_contain_text("greater than or equal to 0")
    page.locator("#option-samples").fill("2")
    page.locator("#option-samples").press("Tab")
    expect(page.locator("#option-samples-help")).to_contain_text("Draw so many")
    page.locator("#more-options summary").click()
    page.locator("#option-suppress").fill("nothing")
    page.locator("#option-suppress").press("Tab")
    expect(page.get_by_role("alert")).to_contain_text("not tokens of the target vocabulary")
    page.locator("#reset-options").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("radio")).to_have_count(3)
    expect(page.locator("#option-suppress")).to_have_value("")
    page.locator("#option-beam").fill("1")
    page.locator("#option-beam").press("Tab")
    expect(page.get_by_role("radio")).to_have_count(1)
    page.reload()
    expect(page.locator("#option-beam")).to_have_value("1")


def test_the_theme_is_that_of_the_system_or_the_chosen_one(page: Page) -> None:
    body = page.locator("body")
    expect(body).to_have_css("background-color", "rgb(243, 245, 248)")
    page.emulate_media(color_scheme="dark")
    expect(body).to_have_css("background-color", "rgb(18, 21, 26)")
    page.locator("#theme").select_option("light")
    expect(body).to_have_css("background-color", "rgb(243, 245, 248)")
    page.reload()
    expect(body).to_have_css("background-color", "rgb(243, 245, 248)")


def test_a_narrow_screen_stacks_the_panes(page: Page, expected: list[Any]) -> None:
    page.set_viewport_size({"width": 320, "height": 640})  # 1280 pixels at a zoom of 400 %
    translated(page, expected)
    page.locator("#options-button").click()
    source, target = page.locator("#source").bounding_box(), page.locator("#target").bounding_box()
    assert source is not None
    assert target is not None
    assert target["y"] >= source["y"] + source["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_shortcuts_are_listed(page: Page) -> None:
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keyboard")).to_contain_text("Translate now")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
