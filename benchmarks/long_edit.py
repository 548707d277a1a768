"""Edits of a short and of a long file, for `paceline bench`: does a drafter gain as much after 6,000 tokens?

    python benchmarks/long_edit.py MODEL build/edits          # short.jsonl and long.jsonl, of this repository's files
    paceline bench MODEL --suite build/edits/short.jsonl -n 128 -d suffix
    paceline bench MODEL --suite build/edits/long.jsonl -n 128 -d suffix

Both ask for the same files with one name changed in each. In long.jsonl, other files stand before, as a coding agent
sends them; the answer is the same file.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from paceline.target.load import load

ROOT = Path(__file__).parent.parent
EDITS = {"jsonl.py": ("value", "item"), "processor.py": ("level", "tier"), "outputs.py": ("path", "place")}
"""Files, each with a name and the one to put in its place."""
SHORT = 80
"""Lines of a file that is edited."""


def main() -> None:
    """Write the two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model whose tokenizer counts")
    parser.add_argument("out", type=Path, help="folder for the two files")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of the files before the one that is edited")
    asked = parser.parse_args()
    tokenizer = load(asked.model, dtype="auto", device="cpu", native=True).tokenizer
    every = sorted((ROOT / "src" / "paceline" / "engine").glob("*.py"))
    before = "\n".join(_shown(file.name, file.read_text("utf-8")) for file in every)
    while len(tokenizer.encode(before)) > asked.tokens:
        before = before[: int(len(before) * asked.tokens / len(tokenizer.encode(before)))]
    asked.out.mkdir(parents=True, exist_ok=True)
    for kind, text in (("short", ""), ("long", f"These files may be of use:\n\n{before}\n```\n\n")):
        lines = [json.dumps({"id": f"{kind}-{n}", "category": "rename", "prompt": text + edit})
                 for n, edit in enumerate(map(_edit, EDITS))]  # fmt: skip
        (asked.out / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def _edit(name: str) -> str:
    (file,) = ROOT.glob(f"packages/net/src/paceline/{name}")
    text = "\n".join(file.read_text("utf-8").splitlines()[:SHORT])
    old, new = EDITS[name]
    assert re.search(rf"\b{old}\b", text), f"{name} has no {old}"
    ask = f"Rename `{old}` to `{new}` everywhere in this file. Answer with the whole file, changed, in one block."
    return f"{ask}\n\n{_shown(name, text)}"


def _shown(name: str, text: str) -> str:
    return f"```python\n# {name}\n{text}\n```\n"


if __name__ == "__main__":
    main()
