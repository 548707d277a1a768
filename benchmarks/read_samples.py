"""Whether a server samples what its model says: its answers, read by transformers in float32.

    python benchmarks/read_samples.py MODEL http://localhost:8000/v1 http://localhost:8001/v1

Checks what `paceline certify` finds without its code and without the log-probabilities that servers report. For each
server, with top-p 0.9 at temperature 0.7: tokens that top-p removes, with a margin for rounding. At temperature 1: the
surprisal of all tokens, and what is right. The server must return token ids (`return_token_ids`: vLLM, ours).
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

import torch
from transformers import AutoModelForCausalLM

PROMPTS = (
    "Hello! What can you do?",
    "Count from 1 to 9, and then again from 1 to 9.",
    "Repeat both sentences, then say in your own words why. The red cat sat on the mat. The blue dog sat on the mat.",
    "Copy the code, then explain it in one sentence, then copy it again:\nfor i in range(10):\n    print(i, i * i)",
)
TOP_P, MARGIN = 0.9, 0.03
COOL, HOT = {"temperature": 0.7, "top_p": TOP_P}, {"temperature": 1.0}
AT_ONCE = 8


Answers = list[tuple[list[int], list[int]]]
"""Token ids of prompts and of their answers."""


def sample(url: str, model: str, answers: int, tokens: int, how: dict[str, float]) -> Answers:
    """Answers to the prompts in turn, each with a seed of its own."""

    def ask(seed: int) -> tuple[list[int], list[int]]:
        messages = [{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}]
        asked = {"model": model, "messages": messages, "max_tokens": tokens, "seed": seed, "return_token_ids": True}
        body = json.dumps(asked | how).encode()
        with urlopen(Request(f"{url}/chat/completions", body, {"content-type": "application/json"})) as response:
            answer = json.load(response)
        return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, range(answers)))


def read(model: Any, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
    """Log-probabilities at the places of the answer, [n, V]."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def removed(model: Any, answers: Answers) -> str:
    """How many tokens top-p removes."""
    places = count = 0
    for prompt, answer in answers:
        for row, token in zip(read(model, prompt, answer, COOL["temperature"]), answer, strict=True):
            places += 1
            count += bool(row[row > row[token]].exp().sum() >= TOP_P + MARGIN)
    return f"top-p removes {count} of {places:,} tokens"


def surprisal(model: Any, answers: Answers) -> str:
    """Of all tokens, and its expectation with one standard deviation."""
    said = right = variance = 0.0
    for prompt, answer in answers:
        rows = read(model, prompt, answer, HOT["temperature"])
        entropy = -(rows.exp() * rows).sum(-1)
        said -= float(rows.gather(1, torch.tensor(answer)[:, None]).sum())
        right += float(entropy.sum())
        variance += float(((rows.exp() * rows * rows).sum(-1) - entropy**2).sum())
    return f"surprisal {said:,.0f} nats, where {right:,.0f} ± {variance**0.5:,.0f} are right"


def main() -> None:
    """Ask every server for samples of both kinds, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the servers' model, a folder")
    parser.add_argument("urls", nargs="+", help="up to /v1")
    parser.add_argument("--name", default="m", help="the model's name on the servers")
    parser.add_argument("--answers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=48)
    asked = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    for url in asked.urls:
        cool, hot = (sample(url, asked.name, asked.answers, asked.tokens, how) for how in (COOL, HOT))
        print(f"{url}: {removed(model, cool)}; {surprisal(model, hot)}", flush=True)


if __name__ == "__main__":
    main()
