"""What all peers have in common: names, options, and that none is imported unasked."""

import sys

import pytest
import torch
from tests import models
from tests.bench.peers import opened, peer
from tests.paths import REPOSITORY

from paceline.errors import MethodError, PacelineError
from paceline.net.completion import Completion
from paceline.peers import PEERS, describe, parse_peer
from paceline.peers.peer import Peer
from paceline.peers.setup import cut, cut_rounds, model_bytes


def test_every_peer_in_the_table_can_be_named():
    for name, entry in PEERS.items():
        takes_file = ":" in entry.help
        found, config = parse_peer(f"{name}:x" if takes_file else name)
        assert issubclass(found, Peer)
        assert getattr(config, "checkpoint", None) == ("x" if takes_file else None), name
        assert all(option.help for option in describe(name)), name


def test_options_reach_the_peer():
    config = parse_peer(" vllm-ngram,k=7,max=4,eager=true ")[1]
    assert (config.k, config.min, config.max, config.eager) == (7, 1, 4, True)
    config = parse_peer("transformers-assisted:some/folder,schedule=heuristic,confidence=0")[1]
    assert (config.checkpoint, config.tokens, config.schedule, config.confidence) == ("some/folder", 20, "heuristic", 0)


def test_the_page_lists_every_peer_and_option():
    page = (REPOSITORY / "docs" / "peers.md").read_text("utf-8")
    for name, entry in PEERS.items():
        assert f"| `{name}` | {entry.help} | {entry.needs or 'nothing more'} |\n" in page
        for option in describe(name):
            assert f"| `{option.name}` | `{str(option.default).lower()}` | {option.help} |\n" in page, (
                name, option.name,
            )


@pytest.mark.parametrize(("spec", "says"), [
    ("vlm-ngram", "There is no peer 'vlm-ngram'. Did you mean 'vllm-ngram'\\? Peers: transformers, "),
    ("vllm-ngram,kk=3", "vllm-ngram has no option 'kk'. Did you mean 'k'\\? Its options: eager, k, min, max."),
    ("vllm-ngram,k=many", "k is 'many'; it must be a whole number"),
    ("transformers,tokens=3", "It has no options"),
    ("transformers:x", "takes no checkpoint"),
    ("vllm-draft", "vllm-draft needs a checkpoint: write vllm-draft:PATH"),
    ("transformers-assisted:x,schedule=heuristics", "Did you mean 'heuristic'"),
])
def test_a_wrong_name_or_option_says_what_exists(spec, says):
    with pytest.raises(MethodError, match=says):
        parse_peer(spec)


def test_a_dtype_must_be_settled(tiny):
    with pytest.raises(PacelineError, match="one of float32, bfloat16, float16, not 'auto'"):
        peer("transformers", tiny, dtype="auto")


def test_no_engine_is_imported_before_it_is_opened():
    before = set(sys.modules)  # another test may have imported one
    for name in PEERS:
        describe(name)
    assert not {"vllm", "llama_cpp"} & (set(sys.modules) - before)


class Noted(Peer):
    """Answers each prompt by itself, and notes what it is asked together."""

    def __init__(self):
        super().__init__("noted", 2, None, ends=(7,))
        self.groups = []

    def answer(self, prompts, params):
        self.groups.append(([prompt[0] for prompt in prompts], params[0].stop_token_ids))
        return [Completion(tokens=list(prompt)) for prompt in prompts]


def test_groups_are_alike_and_no_larger_than_an_engine_takes():
    one, bodies = Noted(), [{"prompt": [n], "max_tokens": 5 if n == 1 else 4} for n in range(5)]
    assert [done.tokens for done in one.ask(bodies, 9)] == [[n] for n in range(5)]
    assert [asked for asked, _ in one.groups] == [[0, 2], [3, 4], [1]]


def test_the_models_end_tokens_end_an_answer_unless_it_ignores_them():
    one = Noted()
    one.ask([{"prompt": [0], "stop_token_ids": [3], "ignore_eos": ignored} for ignored in (False, True)])
    assert one.groups == [([0], (3, 7)), ([0], (3,))]


def test_bytes_a_forward_reads(tiny, tmp_path):
    hidden, rows = 64, models.VOCAB_SIZE
    layer = 2 * hidden * hidden + 2 * hidden * 32 + 3 * hidden * 96 + 2 * hidden
    whole = 4 * layer + hidden + rows * hidden  # the head, not the input embedding
    assert model_bytes(str(tiny), torch.float32) == 4 * whole
    assert model_bytes(str(tiny), torch.bfloat16) == 2 * whole
    tied = models.make("smollm", tmp_path)
    assert model_bytes(str(tied), torch.float32) == 4 * (3 * layer + hidden + rows * hidden)
    with opened(f"transformers-assisted:{tied}", tiny) as one:
        assert (one.target_bytes, one.draft_bytes) == (4 * whole, 4 * (3 * layer + hidden + rows * hidden))


def test_cutting():
    assert (cut([5, 6, 7, 6], {6}, 10), cut([5, 6, 7], {9}, 2), cut([], {9}, 2)) == ([5, 6], [5, 6], [])
    assert (cut_rounds([1, 3, 3], 5), cut_rounds([1, 3, 3], 4)) == ([1, 3, 1], [1, 3])
