"""Hashes of what small random models of every family say with `exact`: the same on every processor.

    python -m tests.hashes --write          # tests/hashes.json
    python -m tests.hashes llama2 qwen3     # print those of these families

Weights and texts are whole numbers of NumPy's PCG64, scaled: the same with any version of torch."""

import argparse
import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.engine.engine import Engine
from paceline.formats.precision import quantised
from paceline.formats.shape import weight_shapes
from paceline.kernels.blocks import Blocks
from paceline.target.decoder import Decoder
from tests import exact, models
from tests.drafters import Coupled

FILE = Path(__file__).with_name("hashes.json")
KINDS = {"float32": (None, 0), "int8, 8": ("int8", 8), "int4, 16": ("int4", 16)}
"""Precision of the weights, and bits of inputs of products with blocks."""
PARAMS = (
    SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=1, max_tokens=12, logprobs=2),
    SamplingParams(temperature=1.3, min_p=0.02, seed=2, max_tokens=12, logprobs=0),
    SamplingParams(
        temperature=1.0, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias={7: 1.5}, seed=3, max_tokens=12, logprobs=1,
    ),
)  # fmt: skip


class Source:
    """Random numbers."""

    def __init__(self, seed):
        self._bits = np.random.PCG64(seed)

    def noise(self, *shape):
        """Float32 around 0, of variance 1."""
        whole = self._bits.random_raw(int(np.prod(shape))) >> 40
        return torch.from_numpy(((whole / 2**24 - 0.5) * 12**0.5).astype(np.float32)).view(shape)

    def tokens(self, count):
        return (4 + self._bits.random_raw(count) % (models.VOCAB_SIZE - 4)).tolist()


def target_of(family, kind):
    config, source = models.config(family), Source(0)
    shapes = weight_shapes(config)
    has_states = any(name.endswith("A_log") for name in shapes)
    dense = {name: models.shaped(name, source.noise(*shape), has_states) for name, shape in shapes.items()}
    precision, bits = KINDS[kind]
    weights = quantised(dense, precision) if precision else {**dense}
    for weight in weights.values():
        if isinstance(weight, Blocks):
            weight.activations = bits
    target = Decoder(config, weights, device="cpu", eos_token_ids=(models.EOS,))
    target.make_exact()
    return target


def said_by(target):
    """Logits of single tokens, a prompt at once, chains, a tree, and a batch."""
    text, rng = Source(1).tokens(90), np.random.default_rng(0)
    found = [exact.one_by_one(target, text), *(exact.in_pieces(target, text, sizes) for sizes in ([90], [64, 26]))]
    slots = exact.prepared(target, [text[:70], text[:33], text[3:40]])
    drafted, parents, _ = exact.hidden_in_tree(rng, text[70:76], 14, models.VOCAB_SIZE)
    trees = [exact.tree(slots[0], drafted, parents), *(exact.tree(slot, [9, 8], [-1, 0]) for slot in slots[1:])]
    found.append(target.verify([*trees, Segment.chunk(target.add_row(90), np.array(text), last=True)]).logits)
    return found


def answers_of(target):
    """Tokens and log-probabilities of answers, greedy and sampled, which are the same without drafts, with chains and
    with trees."""
    table = 3 * Source(2).noise(models.VOCAB_SIZE, models.VOCAB_SIZE)
    prompts = [Source(3 + i).tokens(20) for i in range(4)]
    said = []
    for draft in ("none", Coupled(table), Coupled(table, (3, 2))):
        engine = Engine(target, draft, exact=True, reuse=False)
        rows = [engine.add(prompt, params) for prompt, params in zip(prompts, PARAMS, strict=True)]
        engine.finish(rows)
        assert not any(row.error for row in rows)
        made = [(row.tokens.tolist(), row.logprobs, row.prompt_logprobs) for row in rows]
        assert said in ([], made), "a seed gives another text with another draft"
        said = made
    return said


def hashes(family):
    """By kind: of logits, and of answers. 12 digits each."""
    found = {}
    for kind in KINDS:
        target = target_of(family, kind)
        with torch.inference_mode():
            logits = b"".join(part.contiguous().numpy().tobytes() for part in said_by(target))
        parts = logits, repr(answers_of(target)).encode()  # repr gives every bit of a float
        found[kind] = [sha256(part).hexdigest()[:12] for part in parts]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[*models.NATIVE])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"  {json.dumps(family)}: {json.dumps(hashes(family))}" for family in options.families]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    FILE.write_text(text) if options.write else print(text, end="")


if __name__ == "__main__":
    main()
