"""The page at `/`, driven in a headless Chromium against a server on the real model."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from lockstep.async_llm import AsyncLLM
from tests.server.support import ServerThread

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(lambda: AsyncLLM("smollm2", threads=2)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # A machine that names a browser must have it; one that names none may have none.
    path = os.environ.get("LOCKSTEP_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium here; name one in LOCKSTEP_BROWSER")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, server: ServerThread) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1180, "height": 760})
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(server.url)
    expect(opened.locator("#status")).to_contain_text("ready")
    yield opened
    context.close()
    assert not complaints


def ask(page: Page, question: str, tokens: int = 12) -> None:
    page.fill("#max_tokens", str(tokens))
    page.fill("#question", question)
    page.press("#question", "Enter")
    expect(page.locator(".message.assistant").last.locator("footer button")).to_be_visible(
        timeout=30_000
    )


def test_chat_shows_every_token_with_what_else_was_likely(page: Page) -> None:
    ask(page, "Why is the sky blue?")
    tokens = page.locator(".message.assistant .token")
    expect(tokens).to_have_count(12)
    tokens.nth(3).hover()
    bars = page.locator("#tip .bar")
    assert bars.count() in (5, 6)  # the five most probable, and the drawn one if not among them
    expect(page.locator("#tip .bar.chosen")).to_have_count(1)
    shares = [float(text.strip("<%")) for text in page.locator("#tip .bar-value").all_inner_texts()]
    assert all(0 <= share <= 100 for share in shares)
    assert sum(shares) <= 105
    page.locator("#question").hover()
    expect(page.locator("#tip")).to_be_hidden()
    tokens.nth(4).focus()  # for those who do not point
    expect(page.locator("#tip")).to_be_visible()


def test_asking_again_gives_the_same_bits_and_another_seed_does_not(page: Page) -> None:
    ask(page, "Name a colour and say why you like it.")
    page.click(".message.assistant footer button")
    expect(page.locator(".verdict.ok")).to_have_text(
        re.compile("same bits: 12 tokens"), timeout=30_000
    )
    first = page.locator(".message.assistant .body").inner_text()
    page.click("#clear")
    page.fill("#seed", "8")
    ask(page, "Name a colour and say why you like it.")
    assert page.locator(".message.assistant .body").inner_text() != first


def test_a_conversation_goes_on_and_stops_when_told(page: Page) -> None:
    ask(page, "My name is Ada.")
    ask(page, "What is my name?")
    prompt = page.locator(".message.assistant footer p").last.inner_text()
    found = re.search(r"prompt (\d+), (\d+) from cache", prompt)
    assert found is not None
    assert int(found[2]) > 16  # the first turn is not computed again
    page.fill("#max_tokens", "2000")
    page.fill("#question", "Count from one to a thousand.")
    page.click("#send")
    expect(page.locator(".message.assistant").last.locator(".token").nth(3)).to_be_visible(
        timeout=30_000
    )
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("0 running")


def test_text_is_never_taken_for_markup(page: Page) -> None:
    ask(page, "<img src=x onerror='document.title=1'><b>bold</b>", tokens=2)
    assert page.locator("#messages img, #messages b").count() == 0
    assert page.title() == "Lockstep"


def test_a_refused_request_says_why_and_the_page_goes_on(page: Page) -> None:
    page.fill("#temperature", "-1")
    page.fill("#question", "Hello")
    page.click("#send")
    expect(page.locator("#messages .verdict.bad")).to_contain_text("temperature")
    page.fill("#temperature", "0")
    ask(page, "Hello", tokens=3)


def test_decisions_show_a_bar_for_every_option(page: Page) -> None:
    page.click("#tab-decide")
    page.click('[data-add="score"]')
    page.click("#decide-send")
    answers = page.locator(".answer")
    expect(answers).to_have_count(3, timeout=30_000)
    assert [answers.nth(i).locator(".bar").count() for i in range(3)] == [2, 3, 3]
    for i in range(3):
        texts = answers.nth(i).locator(".bar-value").all_inner_texts()
        assert sum(float(text.strip("<%")) for text in texts) == pytest.approx(100, abs=0.5)
    page.locator("fieldset .remove").first.click()
    page.click("#decide-send")
    expect(answers).to_have_count(2)


def test_the_engine_view_is_live(page: Page) -> None:
    ask(page, "Say hello.", tokens=4)
    page.click("#tab-engine")
    steps = page.locator(".tile", has_text="steps").locator("strong")
    expect(steps).to_have_text(re.compile(r"[1-9]"))
    expect(page.locator("#facts tr", has_text="fingerprint")).to_be_visible()
    expect(page.locator("#chart-rate polyline")).to_have_count(1)
    page.keyboard.press("Tab")
    page.locator("#tab-engine").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#decide")).to_be_visible()


def test_only_its_own_files_are_served_and_no_script_from_elsewhere(server: ServerThread) -> None:
    for path in ("..%2f..%2fapp.py", "__init__.py", "nothing.js", "%2e%2e/app.py"):
        assert httpx.get(f"{server.url}/page/{path}").status_code == 404
    headers = httpx.get(server.url).headers
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]


def test_a_branch_decides_where_there_is_one(browser: Browser, judged_server: ServerThread) -> None:
    opened = browser.new_page()
    opened.goto(judged_server.url)
    opened.click("#tab-decide")
    expect(opened.locator("#decide-by option")).to_have_text(["parrot", "codes", "judge", "reward"])
    opened.select_option("#decide-by select", "codes")
    opened.click("#decide-send")
    expect(opened.locator("#answers .answer")).to_have_count(2)
    opened.close()
