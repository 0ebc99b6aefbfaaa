"""The page in Chromium as a distribution packages it (Debian: `apt-get install chromium`)."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
IN_A_BROWSER = (
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None and not os.environ.get("CI"),
        reason="there is no chromium here (Debian: apt-get install chromium)",
    ),
)
"""Marks of tests that open the page. Without Chromium they are skipped, but in CI, where they fail."""

SIZES = {"1280": (1280, 900), "390": (390, 844)}
PICTURES = "SGLANG_FAIR_TEST_PICTURES"
"""Names a folder in which to leave pictures of the page."""


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """A browser, until the block ends."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "CI has no chromium"
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=CHROMIUM,
            headless=True,
            args=["--no-sandbox", "--disable-background-networking", *arguments],
        )
        yield made
        made.close()


class Page:
    """The page that operators watch, opened with the operators' key in a context of its own. `trouble` is whatever must
    not happen on it."""

    def __init__(self, browser: Any, url: str, key: str, size: str = "1280", scheme: str = "light") -> None:
        width, height = SIZES[size]
        # For axe, which is put into the page, the page's own policy is off; the policy has a test of its own.
        self._context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            bypass_csp=True,
            http_credentials={"username": "operator", "password": key},
        )
        self.trouble: list[str] = []
        self.page = self._context.new_page()
        self.page.set_default_timeout(120_000)
        self.page.on("console", lambda message: message.type == "error" and self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("#replicas tbody tr")

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def _asked(self, url: str) -> None:
        if urlsplit(url).hostname != "127.0.0.1" and not url.startswith("data:"):
            self.trouble.append(f"asked {url}")

    def client(self, name: str) -> dict[str, float | None]:
        """What the row of a client says."""
        row = self.page.query_selector(f"#clients tr[data-client={name}]")
        values = {} if row is None else row.evaluate("row => ({...row.dataset})")
        return {
            one: float(values[one]) if values.get(one) else None
            for one in ("share", "fair", "wait", "weight")
        }

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits, while the page goes on."""

        def check() -> Any:
            self.page.wait_for_timeout(200)
            return condition()

        return wait_until(check, what, 180)

    def health(self) -> str:
        return self.page.get_attribute("#health", "data-health")

    def axe(self) -> list[str]:
        """Findings that matter."""
        from axe_playwright_python.base import AXE_FILE_PATH

        self.page.evaluate(AXE_FILE_PATH.read_text())
        found = self.page.evaluate("axe.run()")["violations"]
        return [
            f"{one['id']}: {one['nodes'][0]['html']}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    def picture(self, name: str, *, whole: bool = False) -> None:
        if folder := os.environ.get(PICTURES):
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=whole)
