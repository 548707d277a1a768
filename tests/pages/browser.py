"""Pages in a headless Chromium: on a phone and on a desk, light and dark.

found, complaints = measured(tmp_path, html)      # what the page says of itself, by the window's width
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr",
)  # fmt: skip
WIDTHS = (390, 1280)
MEASURE = """<script>
onload = () => {
  document.querySelectorAll("details").forEach(one => { one.open = true })
  const color = getComputedStyle(document.body).backgroundColor
  const loaded = performance.getEntriesByType("resource").map(one => one.name)
  const pictures = [...document.querySelectorAll("svg")].map(one => one.getBoundingClientRect().width)
  const holds = one => /auto|scroll|hidden/.test(getComputedStyle(one).overflowX)
  const scrolls = one => one && (holds(one) || scrolls(one.parentElement))
  const outside = [...document.body.querySelectorAll("*")].filter(one => {
    const box = one.getBoundingClientRect()
    return (box.right > innerWidth + 1 || box.left < -1) && !scrolls(one.parentElement)
  })
  const cut = [...document.querySelectorAll(".wide")].filter(one => one.scrollWidth > one.clientWidth + 1)
  const crossed = [...document.querySelectorAll("svg")].filter(drawn => {
    const boxes = [...drawn.querySelectorAll("text")].map(one => one.getBoundingClientRect())
    return boxes.some((a, i) => boxes.some((b, j) => i < j && a.left + 1 < b.right && b.left + 1 < a.right &&
                                                     a.top + 3 < b.bottom && b.top + 3 < a.bottom))
  })
  const says = one => one.tagName + " " + one.textContent.trim().slice(0, 60)
  parent.postMessage({width: innerWidth, wide: document.documentElement.scrollWidth, color, loaded,
                      narrowest: Math.min(...pictures), height: document.documentElement.scrollHeight,
                      outside: outside.map(says), cut: cut.map(says), crossed: crossed.map(says)}, "*")
}
</script>"""
# The narrowest window of headless Chromium is wider than a phone, so the page is put into frames.
FRAMES = """<!doctype html><html style="color-scheme: light dark"><body style="margin: 0"><script>
const told = []
onmessage = message => {
  told.push(message.data)
  if (told.length == 2) {
    document.body.replaceChildren(JSON.stringify(told))
  }
}
</script>%s</body></html>"""


def browse(folder: Path, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={folder / 'profile'}", *options, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def measured(folder: Path, html: str, *options: str) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """What the page says of itself by window width, every detail unfolded; and what the browser complained of."""
    (folder / "page.html").write_text(_with_measure(html), "utf-8")
    frames = [f'<iframe src="page.html" style="width: {w}px; height: 900px; border: 0"></iframe>' for w in WIDTHS]
    (folder / "frames.html").write_text(FRAMES % "".join(frames), "utf-8")
    done = browse(folder, folder / "frames.html", "--dump-dom", "--virtual-time-budget=5000", *options)
    told = re.search(r"\[\{.*\}\]", done.stdout)
    assert told, done.stdout[:500]
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {one["width"]: one for one in json.loads(told[0])}, complaints


def _with_measure(html: str) -> str:
    return re.sub(r"(</body>)?\s*</html>\s*$", lambda _: f"{MEASURE}</html>", html)
