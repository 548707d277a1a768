"""Texts that are kept beside the tests: PACELINE_GOLDEN=1 writes them anew, and the difference is read as any other."""

import os
import re
from html import unescape
from pathlib import Path

BLOCKS = re.compile(r"</?(?:p|h\d|tr|li|dt|dd|div|section|summary|svg)\b[^>]*>")


def same(name, text):
    """Whether a text is the one that is kept under this name."""
    file = Path(__file__).with_name(name)
    if os.environ.get("PACELINE_GOLDEN"):
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8"), f"if this is as it should be: PACELINE_GOLDEN=1 ({file})"


def plainly(html):
    """What a reader gets of a page: its text, a line for each row of a table, and how wide bars are."""
    html = re.sub(r"<style>.*?</style>|\s+", " ", html, flags=re.DOTALL)
    html = re.sub(r"</(?:text|title)>", "; ", html)
    html = re.sub(r'<(?:i|u|div) style="([^"]*width:[^"]*)"([^>]*)>', r" [\1]\2 ", html)
    text = unescape(re.sub(r"<[^>]*>", "", BLOCKS.sub("\n", re.sub(r"</t[dh]>", " | ", html))))
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines() if line.strip())
