"""The page at / in a real Chromium, used as a person would: a chat, drafted runs in colour, figures that move."""

import re
import shutil
import subprocess
from contextlib import contextmanager
from time import monotonic, sleep

import httpx2 as httpx
import pytest

from tests import models
from tests.serve.live import engine, serving

DRIVER = shutil.which("chromedriver")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
pytestmark = pytest.mark.skipif(DRIVER is None, reason="there is no chromedriver here")


class Browser:
    """A window of Chromium, by the WebDriver protocol."""

    def __init__(self, driver, profile):
        self._http = httpx.Client(base_url=driver, timeout=60)
        options = {"args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._at = "/session"
        made = self.do("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._at = f"/session/{made['sessionId']}"

    def do(self, method, path, body=None):
        """One command; what it returns."""
        reply = self._http.request(method, self._at + path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["value"]

    def run(self, script):
        """What a script in the page returns."""
        return self.do("POST", "/execute/sync", {"script": script, "args": []})

    def on(self, selector, action, **body):
        """Act on one element, such as click, clear or value (which types)."""
        found = self.do("POST", "/element", {"using": "css selector", "value": selector})
        self.do("POST", f"/element/{next(iter(found.values()))}/{action}", body)

    def until(self, script, wanted, seconds=30):
        """What a script returns once it is as wanted."""
        end = monotonic() + seconds
        while not wanted(value := self.run(script)):
            assert monotonic() < end, f"{script}: {value!r} after {seconds} s"
            sleep(0.05)
        return value


@contextmanager
def browsing(profile):
    """A browser that is closed afterwards."""
    driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True)
    port = next(match[1] for line in driver.stdout if (match := re.search(r"successfully on port (\d+)", line)))
    browser = None
    try:
        browser = Browser(f"http://127.0.0.1:{port}", profile)
        yield browser
    finally:
        if browser is not None:
            browser.do("DELETE", "")
        driver.terminate()
        driver.wait()


@pytest.mark.slow
def test_the_page_asks_for_a_key_and_sends_it(tmp_path):
    made = engine(models.make_repetitive(tmp_path / "tiny", max_position_embeddings=256), max_batch=4)
    answer = 'return document.getElementById("answer").textContent'
    hidden = 'return document.getElementById("key").hidden'
    with serving(made, api_keys=("right",)) as address, browsing(tmp_path / "profile") as browser:
        browser.do("POST", "/url", {"url": address})
        assert browser.run(hidden)
        browser.on("button", "click")
        browser.until(answer, lambda text: "the key is missing" in text)
        assert not browser.run(hidden)
        browser.on("#key", "value", text="right")
        for _ in range(2):  # the second time in a page that was loaded again
            browser.on("button", "click")
            browser.until(answer, lambda text: text and "key" not in text)
            assert browser.run("return sessionStorage.getItem('key')") == "right"
            browser.do("POST", "/refresh", {})
            browser.until(answer, lambda text: not text)


@pytest.mark.slow
def test_the_page_shows_a_chat_and_moves(tmp_path):
    # A model that repeats itself, when sampled too, so that drafts are accepted.
    folder = models.make_repetitive(tmp_path / "tiny", max_position_embeddings=256)
    models.rewrite(folder, lambda name, weight: weight * 50 if "lm_head" in name else weight)
    made = engine(folder, max_batch=4)
    step = made.step
    made.step = lambda: (sleep(0.02), step())[1]  # so that an answer takes as long as the page needs to look twice
    shown = 'return document.getElementById("%s").textContent'
    with serving(made) as address, browsing(tmp_path / "profile") as browser:
        browser.do("POST", "/url", {"url": address})
        assert browser.until(shown % "model", bool) == "tiny"
        drafts = browser.run('return [...document.querySelectorAll("#draft option")].map(one => one.value)')
        assert drafts == ["sam", "suffix", "none"]
        browser.on("#prompt", "clear")
        browser.on("#prompt", "value", text="the cat and the cat and the cat and the cat")
        browser.on("button", "click")
        browser.until(shown % "running", lambda text: text == "1")
        browser.until(shown % "speed", lambda text: int(text) > 0)
        browser.until(shown % "running", lambda text: text == "0")
        assert float(browser.until(shown % "accepted", lambda text: text[0].isdigit())) > 0
        marks = 'return [...document.querySelectorAll("#answer mark")].map(m => [m.title, m.textContent, %s])'
        runs = browser.run(marks % "getComputedStyle(m).backgroundColor")
        assert runs
        assert {drafter for drafter, _, _ in runs} == {"sam"}
        assert all(color != "rgba(0, 0, 0, 0)" for _, _, color in runs)
        assert httpx.get(f"{address}/stats").json()["tokens"] > 100
        # Without drafts nothing is marked.
        browser.run('document.getElementById("draft").value = "none"')
        browser.on("button", "click")
        browser.until(shown % "running", lambda text: text == "1")
        browser.until(shown % "running", lambda text: text == "0")
        assert browser.run(shown % "answer")
        assert browser.run(marks % "0") == []
        # A message that is too long is refused in words.
        browser.run('document.getElementById("prompt").value = "cat ".repeat(9999)')
        browser.on("button", "click")
        browser.until(shown % "answer", lambda text: "shorten it" in text)
        loaded = browser.run('return performance.getEntriesByType("resource").map(one => one.name)')
        assert all(name.startswith(address) for name in loaded)
        # The page of the API has each name on one line, on a phone too.
        browser.do("POST", "/url", {"url": f"{address}/docs"})
        browser.run('document.body.style.width = "358px"')
        lines = (
            'return [...document.querySelectorAll("td:first-child")].map(one => {'
            "const text = document.createRange(); text.selectNodeContents(one); return text.getClientRects().length})"
        )
        assert set(browser.until(lines, bool)) == {1}
        complaints = [one for one in browser.do("POST", "/se/log", {"type": "browser"}) if "400" not in one["message"]]
        assert complaints == []
