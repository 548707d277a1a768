"""What users get wrong, of every command: one line that says what was wrong, status 2, and nothing written."""

import json
import shlex
import shutil

import pytest
import torch
from tests import models

PAIR = {"prompt": "the little cat", "response": "the little cat and the dog"}
FILES = {
    "log.jsonl": "".join(json.dumps(PAIR | {"category": name}) + "\n" for name in ("even", "odd")),
    "answers.jsonl": json.dumps({"prompt_tokens": [0, 5], "tokens": [100, 101, 1]}) + "\n", "blank.jsonl": "\n \n",
    "torn.jsonl": json.dumps(PAIR) + '\n{"prompt": "cut off' * 2, "asked.jsonl": '{"prompt": "a"}',
    "unread.jsonl": json.dumps(PAIR | {"notes": "the little cat and the dog"}),
    "spec.jsonl": '{"question_id": 81, "choices": [{"turns": ["a"]}]}',
    "questions.jsonl": '{"question_id": 82, "turns": ["A?"]}', "suite.jsonl": '{"turns": ["a"]}\n{"turns": "a"\n',
    "empty.txt": "", "bytes.txt": b"\xff",
}
REPLAY = "replay log.jsonl --tokenizer tokenizer"
ALIGN = "eval align --out out --model"
TRAIN = "--out out --checkpoints run --tokens 9"
MISTAKES = [
    ("generat", "No such command 'generat'. Did you mean 'generate'?"),
    ("generate model hi --drafft sam", "--drafft", "--draft", "paceline generate --help"),
    ("generate smolm hi", "smolm", "Did you mean 'smollm'"),
    ("generate smollm hi", "smollm", "config.json"),
    ("generate torn hi", "model.safetensors", "damaged"),
    ("generate ./nowhere hi", "there is no folder nowhere", "not: Did you mean 'noise'"),
    ("generate model hi -d auto,table=torn.jsonl", "torn.jsonl is not a table", "it is not JSON", "not:NotJSON("),
    ("generate model hi -d auto,table=log.jsonl", "log.jsonl is not a table", "not:Error("),
    ("generate noise hi", "model.safetensors"),
    ("generate reshaped hi", "shape", "96", "100"),
    ("generate smaller hi", "287", "199"),
    ("generate nan hi", "NaN", "weights"),
    ("generate nan hi --temperature 1", "NaN"),
    ("generate nan hi --compare", "NaN"),
    ("generate nan hi --json", "NaN"),
    ("generate nan hi --compare --json", "NaN"),
    ("generate model hi --cache-memory '2 apples'", "cache_memory is '2 apples'", "such as 2GB"),
    ("generate model hi --cache-memory 9kB", "need", "cache_memory is 9.0 kB", "give it more"),
    ("generate model hi --draft sam,drft=3", "'drft'", "Did you mean 'draft'", "min_match"),
    ("generate model hi --draft sam,draft=x", "draft", "'x'", "a whole number"),
    ("generate nowhere hi --draft samm", "'samm'", "Did you mean 'sam'", "prompt-lookup"),
    *((f"generate model hi -d {method}:{file}", f"{file} holds no weights: name a head's folder")
      for method in ("eagle", "eagle3", "medusa", "hydra", "dflash") for file in ("empty.txt", "log.jsonl")),
    *((f"generate model hi -d {method}:empty.txt", "empty.txt is a file; name") for method in ("kangaroo", "model")),
    ("generate model hi -d dflash:model", "model is no drafter of kind dflash: it says neither block_size nor"),
    ("generate model hi --dtype bfloat61", "'bfloat61'", "bfloat16"),
    ("generate model '' --raw", "empty"),
    ("generate model '' --chat", "empty"),
    ("generate model - --raw", "empty"),
    ("generate model '  '", "blank", "--raw"),
    ("generate model", "no prompt", "--prompts"),
    ("generate model hi --prompts log.jsonl", "both"),
    (f"generate model '{'the cat ' * 200}'", "tokens", "128"),
    ("generate model --prompts none.jsonl", "none.jsonl", "No such file"),
    ("generate model --prompts blank.jsonl", "blank.jsonl", '{"prompt"'),
    ("generate model hi --prediction none.txt", "none.txt", "No such file"),
    ("generate model hi --prediction empty.txt", "empty.txt", "is empty"),
    ("generate model hi --prediction bytes.txt", "bytes.txt, line 1", "not UTF-8"),
    ("generate model hi --draft sam --tune log.jsonl", "--tune is a table for auto"),
    ("methods samm", "Did you mean 'sam'"),
    ("replay none.jsonl --tokenizer tokenizer", "none.jsonl", "No such file"),
    ("replay blank.jsonl --tokenizer tokenizer", "blank.jsonl holds no answers", '"prompt"'),
    ("replay torn.jsonl --tokenizer tokenizer", "torn.jsonl, line 2", "not JSON", "2 of 3 lines cannot be read"),
    ("replay asked.jsonl --tokenizer tokenizer", "asked.jsonl, line 1", "no response"),
    ("replay unread.jsonl --tokenizer tokenizer", 'line 1: the text under "notes" would not be read', "--ignore notes"),
    ("replay spec.jsonl --tokenizer tokenizer", "no prompt has the question_id 81", "--questions"),
    ("replay spec.jsonl --tokenizer tokenizer --questions questions.jsonl", "no prompt has the question_id 81"),
    ("replay log.jsonl", "--tokenizer"),
    ("replay log.jsonl --tokenizer ./nowhere", "there is no folder", "nowhere"),
    ("replay log.jsonl --tokenizer endless", "no end token"),
    ("replay log.jsonl --tokenizer bare", "no chat template", "--template", "vicuna"),
    (f"{REPLAY} -d samm", "'samm'", "Did you mean 'sam'"),
    (f"{REPLAY} -d sam,drft=1", "'drft'", "Did you mean 'draft'"),
    (f"{REPLAY} -d sam+auto", "sam+auto drafts by how long rounds take, and a recording has no rounds"),
    (f"{REPLAY} -d none --sweep draft=1", "none has an option"),
    (f"{REPLAY} --template vicunna", "Did you mean 'vicuna'"),
    (f"{REPLAY} --verify-cost falt", "falt", "flat, linear:X"),
    (f"{REPLAY} --out log.jsonl", "log.jsonl"),
    (f"{REPLAY} --categories even,prime", "'prime'", "even, odd"),
    ("tune model -d sma", "no drafter"),
    ("tune model -d recycling", "best logits"),
    ("tune model -o nowhere/tune.json", "no folder"),
    ("tune model --log nothing.jsonl", "nothing.jsonl"),
    ("certify", "Missing argument 'TARGET'"),
    ("certify model --engine vlm", "there is no engine 'vlm'. Did you mean 'vllm'?"),
    ("certify model --engine xyz", "Engines: paceline, transformers, vllm, llama-cpp, transformers-lookup,"),
    ("certify model -d samm", "There is no drafter 'samm'"),
    ("certify model --engine vllm", "vLLM wants an environment of its own"),
    ("certify model --engine transformers --dtype int8", "runs another model"),
    ("certify server http://127.0.0.1:9/v1", "is the server up?"),
    *((f"{asking} {address}", f"'{address}", "' is no address of a server: write http://HOST:PORT")
      for asking in ("watch", "bench server", "certify server") for address in ("host:8000", "ftp://host")),
    ("quality model --text log.jsonl", "name another with --against or --dtype"),
    ("quality nowhere --dtype int8 --text log.jsonl --save", "--save writes into a model's folder"),
    ("quality model --dtype int8 --text bytes.txt", "bytes.txt, line 1: not UTF-8"),
    ("corpus build out --tokenizer model", "--text FILE... --tokenizer MODEL: a corpus needs all three"),
    ("corpus build out --text log.jsonl", "a corpus needs all three"),
    ("corpus build out --text none.jsonl --tokenizer model", "there is no file"),
    ("corpus build out --text log.jsonl --tokenizer ./nowhere/x", "there is no folder"),
    ("corpus build out --text log.jsonl --tokenizer model --parts x", "no part 'x'"),
    ("corpus build out --text log.jsonl --tokenizer model --workers 2", "--workers are Ray's; add --ray"),
    ("corpus build . --text log.jsonl --tokenizer model", "exists and is not a store"),
    ("corpus info out", "there is no store"),
    ("bench model --out out --suite spec-banch", "spec-bench"),
    ("bench model --out out -d samm", "Did you mean 'sam'?"),
    ("bench model --out out --peer vlm-ngram", "Did you mean 'vllm-ngram'?"),
    ("bench model --out out --peer transformers-lookup,tokns=3", "tokens"),
    ("bench model --out out -n 4000", "no question of"),
    ("bench model --out out --template vicunia", "Did you mean 'vicuna'?"),
    ("bench model --out out --suite suite.jsonl", "line 2"),
    ("bench schedules model --out out --batch 1,x", "--batch is '1,x'; give whole numbers from 1 to 1024"),
    (f"{ALIGN} nowhere/at/all", "nowhere/at/all"),
    (f"{ALIGN} http://127.0.0.1:9/v1", "is the server up"),
    (f"{ALIGN} http://h/v1#m --method align4", "Did you mean 'align3'"),
    ("train tools vocab model --text answers.jsonl", "say where to write the vocabulary"),
    ("train tools vocab model --out out", "there is nothing to count"),
    ("train tools vocab model --text none.jsonl --out out", "none.jsonl cannot be read"),
    ("train tools vocab model --text answers.jsonl --out out --keep 999", "of 999 tokens is asked for"),
    ("train tools vocab model --text answers.jsonl --check out", "there is no vocabulary file"),
    ("train tools vocab nowhere --text answers.jsonl --out out", "'nowhere' is neither a folder here"),
    (f"train model model {TRAIN}", "nothing to train on"),
    (f"train model model {TRAIN} --hidden 100", "--hidden is 100; heads are 64 wide"),
    ("train model model --out out", "nothing to train on"), ("train model model --out out --lr -1", "'--lr'"),
    ("train kangaroo model --out out --tokens 9 --minutes 1", "--minutes and --tokens are budgets for one training"),
]  # fmt: skip


def changed(model, folder, **entries):
    """A copy of a model folder with other entries in its config.json."""
    shutil.copytree(model, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny):
    """A folder with what the lines above name."""
    folder = tmp_path_factory.mktemp("place")
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "model").symlink_to(tiny)
    (folder / "smollm").mkdir()
    for name, weights in (("torn", (tiny / "model.safetensors").read_bytes()[:5000]), ("noise", b"not at all")):
        (changed(tiny, folder / name) / "model.safetensors").write_bytes(weights)
    changed(tiny, folder / "reshaped", intermediate_size=100)
    smaller = changed(tiny, folder / "smaller", vocab_size=200)
    models.rewrite(smaller, lambda name, tensor: tensor[:200] if tensor.shape[0] == 320 else tensor)
    nan = changed(tiny, folder / "nan")
    models.rewrite(nan, lambda name, tensor: tensor * torch.nan if name == "model.norm.weight" else tensor)
    tokenizer = models.tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "endless").mkdir()
    shutil.copy(folder / "tokenizer" / "tokenizer.json", folder / "endless")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "bare")
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0][:70])
def test_a_mistake_is_one_line(command, place, monkeypatch, mistake):
    line, *words = mistake
    monkeypatch.chdir(place)
    monkeypatch.delenv("PACELINE_VLLM_PYTHON", raising=False)
    before = sorted(place.iterdir())
    result = command(*shlex.split(line), stdin="\n")
    assert (result.code, result.out) == (2, ""), result
    (said,) = (line for line in result.err.splitlines() if not line.startswith(("loading ", "compiling ")))
    assert said.startswith("error: ")
    for word in words:
        assert (word.removeprefix("not:") in said) is not word.startswith("not:")
    assert sorted(place.iterdir()) == before
