"""What asks servers and what replays logs runs where torch and transformers are not."""

import json
import re
import subprocess
import sys

import pytest

from paceline.formats.plain_tokenizer import PlainTokenizer
from paceline.formats.tokenizer import Tokenizer
from paceline.formats.tokenizer_files import load_tokenizer
from tests.paths import REPOSITORY
from tests.served import Served

DEMO = REPOSITORY / "models" / "demo"
WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in sys.argv[1].split(",") else PathFinder.find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from paceline.cli import main
sys.exit(main(sys.argv[2:]))
"""
COMMANDS = {
    "certify server {url} --budget 2s --requests 0 --out {out}": "torch,transformers,numba,tokenizers,llguidance",
    "watch {url} --once": "torch,transformers,numba,tokenizers",
    "replay {log} --tokenizer {demo} -d sam -d suffix -d prompt-lookup --json": "torch,transformers",
    "bench server {url} --log {log} --limit 1 -n 2 --warm-up 0 --out {out}/bench": "torch,transformers",
    "tune server {url} --tokenizer {demo} --log {log} --batch 1,2 -n 8 --minutes 0.05 -o {out}/tuned":
        "torch,transformers",
    "corpus build {out}/corpus --text {log} --tokenizer {demo}": "torch,transformers",
}  # fmt: skip
"""Commands, and what they do without."""


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_runs_without(line, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt": "the cat", "response": "and the dog " * 9}) + "\n")
    with Served(accepted=() if line.startswith("tune") else (1,)) as fake:
        words = line.format(url=fake.url, out=tmp_path / "out", log=log, demo=DEMO).split()
        command = [sys.executable, "-c", WITHOUT, COMMANDS[line], *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in ((0, 1) if words[0] == "certify" else (0,)), done.stdout + done.stderr
    assert "not installed" not in done.stderr


@pytest.mark.parametrize("line", [
    "certify {demo} -d sam", "replay {log} --tokenizer {demo} -d eagle3:x", "bench {demo} -d sam --out x",
])
def test_what_needs_the_engine_says_so(line, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "a", "response": "b c d"}\n')
    command = [sys.executable, "-c", WITHOUT, "torch,transformers", *line.format(demo=DEMO, log=log).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert re.search(r"^error: (torch|transformers) is not installed; in a checkout .* pip install '?\.", done.stderr)


CHATS = [
    [{"role": "user", "content": "Hello, <|im_end|> there"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie geht's? 你好 \n\n ok"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}, {"role": "user", "content": "c"}],
]


@pytest.mark.parametrize("file", sorted(DEMO.parent.glob("*/tokenizer.json")), ids=lambda file: file.parent.name)
def test_a_tokenizer_is_the_same_without_transformers(file):
    theirs, ours = load_tokenizer(file.parent), Tokenizer(PlainTokenizer(file.parent))
    assert (ours.vocab_size, ours.eos_token_id, ours.fingerprint) == (
        theirs.vocab_size, theirs.eos_token_id, theirs.fingerprint
    )  # fmt: skip
    for text in ("The cat sat on the mat.", "  naïve\tcafé 你好 <|im_start|>", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.has_chat_template == theirs.has_chat_template
    for chat in CHATS if ours.has_chat_template else ():
        assert ours.encode_chat(chat) == theirs.encode_chat(chat)
        assert ours.render_chat(chat, add_generation_prompt=False) == theirs.render_chat(
            chat, add_generation_prompt=False
        )
