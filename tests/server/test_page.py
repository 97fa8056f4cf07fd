"""The page at `/`: by itself, and in a browser."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import EOS, chain_checkpoint, spell
from tests.helpers.fake_engine import FakeEngine, ask, fake_app
from tests.helpers.served import Served, await_true, served

ANSWER = "Hi <world>é!"


def test_the_page_needs_nothing_from_elsewhere() -> None:
    reply = ask(fake_app(FakeEngine()), "/")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in reply.headers["content-security-policy"]
    assert not re.search(r"https?:|//\w+\.\w+/|@import|<script src|innerHTML", reply.text)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    folder = chain_checkpoint(tmp_path, spell(ANSWER, start="A", end=EOS))
    flags = ("--device", "cpu", "--num-kv-blocks", "64", "--block-size", "4")
    with served(folder, *flags, "--served-model-name", "<tiny>") as it:
        yield it


@pytest.fixture
def browser() -> Iterator[Any]:
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "no-proxy-server"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    it = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield it
    finally:
        it.quit()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_page_shows_the_rack_and_chats(server: Served, browser: Any) -> None:
    def text(name: str) -> str:
        return str(browser.find_element("id", name).text)

    browser.get(server.url)
    await_true(lambda: text("state") == "up", 20)
    assert (text("model"), browser.title) == ("<tiny>", "<tiny> · rackmount")
    assert "attention_backend" in text("parts")
    assert "rackmount-plugins-backends" in text("parts")
    assert "KV cache: 256 tokens" in text("report")
    browser.find_element("id", "words").send_keys("hello\n")
    await_true(lambda: f"hello\n{ANSWER}\n14 tokens" in text("talk"), 20)
    await_true(lambda: "14 tokens" in text("tiles"), 20)
    assert re.search(r"first token [\d.]+ [\d.]+ [\d.]+", text("latencies"))
    browser.find_element("id", "limit").send_keys("0000000")
    browser.find_element("id", "words").send_keys("x" * 300 + "\n")
    await_true(lambda: "too long" in text("talk"), 20)
    problems = [entry for entry in browser.get_log("browser") if "400" not in entry["message"]]
    assert not problems
    server.process.kill()
    await_true(lambda: "no answer" in text("state"), 20)
