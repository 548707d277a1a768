"""lm-eval against a live server: a generation and a likelihood task score as our engine does in the process.

python -m venv ENV && ENV/bin/pip install 'lm-eval[api]' transformers
PACELINE_LM_EVAL=ENV/bin/lm-eval pytest -m slow tests/serve/test_lm_eval_slow.py
"""

import json
import os
import shutil
import subprocess

import pytest

from paceline.core.sampling import SamplingParams
from tests.serve.live import engine, serving

LM_EVAL = os.environ.get("PACELINE_LM_EVAL") or shutil.which("lm-eval")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LM_EVAL is None, reason="lm-eval is not installed")]

WORDS = (
    "dog", "Paris", "blue", "seven", "train", "London", "house", "restaurant", "green", "tree", "monday", "water",
    "hotel", "friend", "school", "music", "doctor", "winter", "bread", "garden", "movie", "flight", "mother", "river",
)  # fmt: skip
ECHOES = [{"question": f'The word is "{word}". Again, the word is "', "answer": word} for word in WORDS]
ENDINGS = [
    {"text": text, "choices": choices, "answer": i % 3}
    for i, (text, *choices) in enumerate(
        (
            ("Hello, how are", "you", "apple", "seventeen"), ("Once upon a", "why", "time", "would"),
            ("Thank you very", "table", "the", "much"),
            ("I would like to book a table at a", "restaurant", "seven", "are"),
            ("The capital of France is", "slowly", "Paris", "London"), ("Two plus two is", "green", "the", "four"),
            ("He opened the door and walked", "in", "blue", "monday"),
            ("What time does the train", "cheese", "leave", "leaves"),
            ("She picked up the book and began to", "chairs", "table", "read"),
            ("The sun rises in the", "east", "pencil", "running"),
            ("There are seven days in a", "dog", "week", "month"), ("The opposite of hot is", "hot", "warm", "cold"),
        )
    )
]
TASKS = {
    "echoes": """
task: echoes
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ['"'], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "endings": """
task: endings
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}


def told(folder, address, model):
    """What lm-eval says of a server: its results by task, and its samples in the order of the data."""
    for (task, text), data in zip(TASKS.items(), (ECHOES, ENDINGS), strict=True):
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in data))
        (folder / f"{task}.yaml").write_text(text.replace("DATA", str(folder / f"{task}.jsonl")))
    about = f"model=tiny,base_url={address}/v1/completions,tokenizer_backend=huggingface,tokenizer={model}"
    command = [
        *(str(LM_EVAL), "--model", "local-completions", "--model_args", f"{about},num_concurrent=4,max_retries=1"),
        *("--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(folder / "out")),
        "--log_samples",
    ]
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    samples = {}
    for task in TASKS:
        (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        samples[task] = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
    return json.loads(results.read_text())["results"], samples


def likelihood(made, context, ending):
    """Log-probability of an ending after a context."""
    begin, whole = made.tokenizer.encode_text(context), made.tokenizer.encode_text(context + ending)
    assert whole[: len(begin)] == begin
    row = made.add(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
    while made.has_work:
        made.step()
    return sum(one.logprob for one in row.prompt_logprobs[len(begin) :] if one is not None)


def test_lm_eval_scores_as_the_engine_does(demo, tmp_path, capsys):
    made = engine(demo, max_batch=8)
    with serving(made) as address:
        results, samples = told(tmp_path, address, demo)
    alone = engine(demo)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=['"'])
    prompts = [alone.tokenizer.encode_text(one["question"]) for one in ECHOES]
    texts = [answer.text for answer in alone.generate(prompts, params)]
    assert [one["filtered_resps"][0] for one in samples["echoes"]] == texts
    score = sum(text == one["answer"] for text, one in zip(texts, ECHOES, strict=True)) / len(ECHOES)
    assert results["echoes"]["exact_match,none"] == pytest.approx(score)
    assert 0 < score < 1, "a score that says little"

    right = 0
    for one, sample in zip(ENDINGS, samples["endings"], strict=True):
        own = [likelihood(alone, one["text"], f" {choice}") for choice in one["choices"]]
        assert [float(pair[0]) for pair in sample["filtered_resps"]] == pytest.approx(own, abs=1e-3)
        right += max(range(3), key=own.__getitem__) == one["answer"]
    assert results["endings"]["acc,none"] == pytest.approx(right / len(ENDINGS))
    assert 0 < right / len(ENDINGS) < 1, "a score that says little"
    with capsys.disabled():
        print(f"\nechoes: exact match {score:.4f}; endings: accuracy {right / len(ENDINGS):.4f}, here and in lm-eval")
