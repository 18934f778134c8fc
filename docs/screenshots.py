"""Draw the pictures of the page that the guides show.

    python docs/screenshots.py [--browser /usr/bin/chromium]

Serves SmolLM2 here, drives the page in a headless Chromium and writes docs/images/*.png.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect, sync_playwright

IMAGES = Path(__file__).parent / "images"
QUESTIONS = (
    "Name three seas.",
    "What is a prime number?",
    "Tell me about bees.",
    "Why do cats purr?",
)


@contextmanager
def served() -> Iterator[str]:
    """A server of its own on a free port; yields its address."""
    command = [sys.executable, "-m", "lockstep", "serve", "smollm2", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        words = (word for line in server.stderr for word in line.split())
        url = next(word for word in words if word.startswith("http://"))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield url.removesuffix("/v1")
    finally:
        server.terminate()
        server.wait()


def load(url: str) -> None:
    """A few requests at once, so that the engine view has something to show."""

    def one(question: str) -> None:
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 220,
        }
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)

    for question in QUESTIONS * 3:
        threading.Thread(target=one, args=(question,), daemon=True).start()


def draw(page: Page, url: str) -> None:
    """All three views."""
    page.goto(url)
    expect(page.locator("#status")).to_contain_text("ready")
    page.fill("#max_tokens", "60")
    page.click("#send")
    button = page.get_by_text("Ask again, compare bits")
    button.click(timeout=60_000)
    expect(page.locator(".verdict.ok")).to_be_visible(timeout=60_000)
    page.locator(".message.assistant .token").nth(6).hover()
    page.screenshot(path=IMAGES / "page-chat.png")
    page.click("#tab-decide")
    page.click('[data-add="score"]')
    page.click("#decide-send")
    expect(page.locator(".answer")).to_have_count(3, timeout=60_000)
    page.screenshot(path=IMAGES / "page-decisions.png")
    page.click("#tab-engine")
    load(url)
    page.wait_for_timeout(9_000)
    page.screenshot(path=IMAGES / "page-engine.png")


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--browser", default="/usr/bin/chromium")
    path = parser.parse_args().browser
    IMAGES.mkdir(exist_ok=True)
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        draw(browser.new_page(viewport={"width": 1180, "height": 860}), url)
        browser.close()


if __name__ == "__main__":
    main()
