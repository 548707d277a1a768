"""dflash: what it computes is the published network's, its cache holds the target's states alone, its drafts keep the
target's law, and its trees are the best ones."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.draft import registry
from paceline.draft.methods.dflash import DFlash
from paceline.draft.models.block import Block
from paceline.draft.models.draft_model import Draft
from paceline.draft.shapes import best_first
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.formats.heads.vocab import Vocabulary
from paceline.train.saving import save_vocabulary
from tests import models, native
from tests.asks import asked
from tests.draft import blocks
from tests.draft.answered import Answered, weakened
from tests.draft.eagles import write
from tests.rounds import prompt_run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    model = weakened(models.model("llama2", num_hidden_layers=4, tie_word_embeddings=False), 0.02)
    here = Answered.of(model, tmp_path_factory.mktemp("blocks"))
    for kind in ("random", "knowing"):
        blocks.save(here.folder / kind, model, kind)
    return here


def drafter(world, kind="knowing", **options):
    made = registry.create(f"dflash:{world.folder / kind}" + "".join(f",{k}={v}" for k, v in options.items()))
    assert isinstance(made, DFlash)
    return made


def states_of(target, text, made):
    """The states [T, taps * H] that a drafter reads of a text."""
    slot = target.add_row(len(text))
    said = target.verify([Segment.chunk(slot, np.array(text), last=False)], made.needs)
    target.drop_row(slot)
    return torch.cat([said.hidden[layer] for layer in made.model.network.form.taps], -1)


def begun(target, made, text, number=0, temperature=0.0):
    """A draft after a text, whose prompt has been run."""
    row = Row(number, text, SamplingParams(temperature, max_tokens=40), max_context=target.max_context)
    row.slot = target.add_row(row.expected_length)
    made.start(row)
    verdict = target.verify([Segment.chunk(row.slot, np.array(text[:-1]), last=False)], made.needs)
    target.commit(row.slot, list(range(len(text) - 1)))
    made.observe(prompt_run(row, text[:-1], verdict))
    (draft,) = made.begin(asked(row))
    return draft


# The network ---------------------------------------------------------------------------------------------------------

SIGHTS = {
    "full": {},
    "window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": False},
    "window that sees later": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 6,
        "sliding_window_non_causal": True,
    },
    "causal window": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
    "window that is off": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": False},
}
NAMES = {
    "full": ("", "model."),
    "window": ("fc.", "encoder.fc."),
    "causal window": ("hidden_norm", "encoder.output_norm_enc"),
}
"""Other names that tensors have in a file, by the beginning that they replace."""


@pytest.mark.parametrize("name", SIGHTS)
def test_a_published_file_computes_what_its_authors_network_does(world, tmp_path, name):
    """In blocks of rows of any length at once; the states are the outputs of the layers that the file names."""
    model, more = world.model, SIGHTS[name]
    slides = more.get("use_sliding_window", True)
    windows = [(6 if slides and "sliding" in kind else None) for kind in more.get("layer_types", ["full"] * 2)]
    old, new = NAMES.get(name, ("", ""))
    named = {
        new + one.removeprefix(old) if one.startswith(old) else one: tensor
        for one, tensor in blocks.random_tensors(model).items()
    }
    made = registry.create(f"dflash:{write(tmp_path, blocks.config(model, **more), named)}")
    assert isinstance(made, DFlash)
    made.bind(world.target)
    texts_ = world.prompts[:3]
    drafts = [begun(world.target, made, text, n) for n, text in enumerate(texts_)]
    filled = made.model.fill(drafts)
    tensors, table = blocks.random_tensors(model), model.model.embed_tokens.weight.detach()
    for text, draft, block in zip(texts_, drafts, filled, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            taps = torch.cat([hidden[i + 1][0] for i in blocks.IDS], -1)
            wanted = blocks.reference(tensors, taps, table[text[-1]], table[3], windows, name == "causal window")
            torch.testing.assert_close(block.states, wanted[1:], atol=2e-4, rtol=2e-4)
            logits = wanted[1:] @ model.lm_head.weight.T
            torch.testing.assert_close(block.logits, logits, atol=2e-3, rtol=2e-3)
        assert made.model.length(draft.row) == len(text) - 1, "nothing of a block is kept"


def test_a_window_ends_where_it_should(world, tmp_path):
    """The oldest token in a window of 6 changes what comes out, the one before it does not."""
    more = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": False}
    made = registry.create(f"dflash:{blocks.save(tmp_path, world.model, 'random', **more)}")
    assert isinstance(made, DFlash)
    made.bind(world.target)
    text = world.prompts[0]
    states = states_of(world.target, text[:-1], made)

    def read(changed):
        other = states.clone()
        if changed is not None:
            other[changed] += 1
        draft = begun(world.target, made, text)
        made.model.pending.read([draft.row], [other])
        (block,) = made.model.fill([draft])
        made.drop(draft.row)
        return block.states[0]

    # The first position of the block sees itself and five tokens of the text, and the others see that position.
    last = len(text) - 2
    assert torch.equal(read(last - 5), read(None))
    assert not torch.allclose(read(last - 4), read(None))


def test_positions_of_a_block_see_each_other(world):
    made = drafter(world, "random")
    made.bind(world.target)
    draft = begun(world.target, made, world.prompts[0])
    (block,) = made.model.fill([draft])
    slot = made.model.pending.slot(draft.row)
    short = Segment(slot, np.zeros(3, np.int64), np.arange(-1, 2), num_logits=2)
    with torch.inference_mode():
        read = made.model.network.fill([draft.row.last_token], [short])
    assert not torch.allclose(read, block.states[:2], atol=1e-3)


# The heads of DSpark -------------------------------------------------------------------------------------------------


def test_a_chain_follows_the_markov_head(world, tmp_path):
    """The head alone knows what comes after a token: with it chains are accepted whole, without it they are not."""
    model = weakened(models.model("llama2", num_hidden_layers=4, tie_word_embeddings=False), 0.0)
    target, tensors = native.of(model, eos=()), blocks.knowing(model, scale=0.0)
    tensors["norm.weight"] = torch.zeros_like(tensors["norm.weight"])  # the layers say nothing
    plain = tensors | {"markov_head.markov_w2.weight": torch.zeros_like(tensors["markov_head.markov_w2.weight"])}
    bare = {name: t for name, t in tensors.items() if not name.startswith(("markov", "confidence"))}
    spark = blocks.dspark(model)
    folders = {
        "with": write(tmp_path / "with", spark, tensors),
        "zero": write(tmp_path / "zero", spark, plain),
        "without": write(tmp_path / "without", spark | {"markov_rank": 0, "enable_confidence_head": False}, bare),
    }
    rounds = {}
    for name, folder in folders.items():
        engine = Engine(target, f"dflash:{folder},stop=fixed,tree=0")
        engine.add(world.prompts[0], SamplingParams(max_tokens=1 + 3 * (blocks.BLOCK + 1), ignore_eos=True))
        rounds[name] = []
        while engine.has_work:
            rounds[name] += [len(delta.tokens) for delta in engine.step()]
    assert rounds["with"] == [1] + [blocks.BLOCK + 1] * 3
    assert rounds["zero"] == rounds["without"]
    assert len(rounds["zero"]) > 4


def test_tree_and_chain_have_the_same_distributions(world):
    """A path's chance in a tree of all tokens is the product of what the chain would draw them with."""
    made = drafter(world, width=models.VOCAB_SIZE, tree=models.VOCAB_SIZE, stop="fixed")
    made.bind(world.target)
    draft = begun(world.target, made, world.prompts[0])
    filled = made.model.fill([draft])
    chances, tokens = made.proposer.best_paths(draft, filled[0])
    for path, chance in list(chances.items())[:30]:
        chain, wanted = Draft.chain(draft.row, draft.row.tokens[made.model.length(draft.row) :].tolist()), 1.0
        for depth in range(1, len(path) + 1):
            token = tokens[path[:depth]]
            wanted *= float(made.model.next([chain], filled)[0].softmax(-1)[token])
            chain.add(token)
        assert chance == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_tree_one_node_wide_is_the_chain(world, temperature):
    """Each place has the noise of its own output position."""
    made = drafter(world, "random", stop="fixed", tree=40, width=1)
    made.bind(world.target)
    draft = begun(world.target, made, world.prompts[0], temperature=temperature)
    [(tree, _)] = made.proposer.propose([draft])
    [(chain, _)] = Block(made.model, made.rule).propose([draft])
    assert tree.tokens.tolist() == chain.tokens.tolist()
    assert len(chain) > 2


def test_tokens_that_are_no_candidates_weigh_what_they_did(world):
    made = drafter(world, width=2, tree=2)
    made.bind(world.target)
    draft = begun(world.target, made, world.prompts[0])
    (block,) = made.model.fill([draft])
    chances, _ = made.proposer.best_paths(draft, block)
    p = block.logits[0].softmax(-1)
    best = p.topk(2).indices
    bias = made.model.network.bias(torch.tensor(draft.tokens[-1]))
    weights = p[best] * bias[best].exp()
    wanted = weights / (weights.sum() + 1 - p[best].sum())
    assert chances[(0,)] == pytest.approx(float(wanted.max()), rel=1e-3)


def test_nothing_is_drafted_of_no_numbers(world, tmp_path):
    broken = blocks.random_tensors(world.model) | {"norm.weight": torch.full((64,), torch.nan)}
    made = drafter(replace(world, folder=write(tmp_path / "nan", blocks.config(world.model), broken).parent), "nan")
    made.bind(world.target)
    assert not made.propose(asked(begun(world.target, made, world.prompts[0]).row))[0].num_drafted


def test_a_block_ends_with_the_context(world, monkeypatch):
    made, most, sizes = drafter(world), world.target.max_context, []
    made.bind(world.target)
    usual = made.model.network.fill
    monkeypatch.setattr(
        made.model.network, "fill", lambda anchors, parts: sizes.append(parts[0].num_run) or usual(anchors, parts)
    )
    for left in (3, 20):
        text = [5 + n % 90 for n in range(most - left)]
        made.propose(asked(begun(world.target, made, text, left).row))
    assert sizes == [4, min(made.model.network.form.block, 21)], "its first place is the last token's"


@pytest.mark.parametrize("sees_token", [True, False])
def test_the_confidence_head_ends_a_chain(world, tmp_path, sees_token):
    """By the token before, unless its file says otherwise, and the position's state; never by the token that is drafted
    there. Files have two names for it, and a group of DSpark's entries."""
    inner, tensors, width = {"markov_rank": 64, "target_layer_ids": [0, 2]}, blocks.knowing(world.model), 128
    if not sees_token:
        inner, width = inner | {"confidence_head_with_markov": False}, 64
        tensors["confidence_head.weight"] = tensors.pop("confidence_head.proj.weight")[:, :width].clone()
        tensors["confidence_head.bias"] = tensors.pop("confidence_head.proj.bias")
    config = {key: one for key, one in blocks.dspark(world.model).items() if key not in inner}
    config |= {"architectures": ["DFlashDraftModel"], "dspark_config": inner}
    here = replace(world, folder=write(tmp_path / "one", config, tensors).parent)
    made = drafter(here, "one", tree=0, stop="confidence", threshold=0.5)
    made.bind(world.target)
    draft = begun(world.target, made, world.prompts[0])
    [tree] = made.propose(asked(draft.row))
    assert tree.calls == 1
    fresh = Draft.chain(draft.row, draft.row.tokens[made.model.length(draft.row) :].tolist())
    filled = made.model.fill([fresh])
    sure, weight = [], blocks.knowing(world.model)["confidence_head.proj.weight"][0, :width]
    for token in tree.tokens[1:].tolist():
        logits = made.model.next([fresh], filled)
        sure += made.model.signals([fresh], filled, logits, made.rule)
        before = tensors["markov_head.markov_w1.weight"][fresh.tokens[-1]]
        features = torch.cat([filled[0].states[len(fresh.drafted)], before])[:width]
        wanted = torch.sigmoid(features @ weight + 1)
        assert sure[-1] == pytest.approx(float(wanted), abs=1e-4)
        fresh.add(token)
    assert all(one >= 0.5 for one in sure[:-1])
    assert len(sure) == blocks.BLOCK or sure[-1] < 0.5


def sparks(model):
    """config.json of one DSpark drafter as it is written by several."""
    flat = blocks.dspark(model)
    own = {key: flat.pop(key) for key in ("mask_token_id", "target_layer_ids", "markov_rank", "enable_confidence_head")}
    inputs = {"aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]]}
    stated = {"speculators_model_type": "dspark", "sample_from_anchor": True, "block_size": flat["block_size"]}
    flat["architectures"] = ["DFlashDraftModel"]
    return {
        "DeepSeek": blocks.dspark(model),
        "SpecForge": flat | {"dflash_config": own | {"projector_type": "dspark", "attention_mode": "gqa"}},
        "SGLang": flat | {"dspark_config": own},
        "speculators": stated | own | inputs | {"target_layer_ids": None, "transformer_layer_config": flat},
    }  # fmt: skip


SPARKS = ("DeepSeek", "SpecForge", "SGLang", "speculators")


@pytest.mark.parametrize("name", SPARKS)
def test_a_dspark_file_computes_what_its_authors_do(world, tmp_path, name):
    """Every position of a block drafts the token after it, and the head adds to it by the token before."""
    model, tensors = world.model, blocks.knowing(world.model)
    folder = write(tmp_path, sparks(model)[name], tensors)
    made = registry.create(f"dflash:{folder},tree=0,stop=fixed,draft={blocks.BLOCK}")
    assert isinstance(made, DFlash)
    made.bind(world.target)
    draft = begun(world.target, made, text := world.prompts[0])
    (block,) = made.model.fill([draft])
    [(tree, _)] = made.proposer.propose([draft])
    table, path = model.model.embed_tokens.weight.detach(), text[-1:]
    with torch.no_grad():
        hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        taps = torch.cat([hidden[i + 1][0] for i in blocks.IDS], -1)
        wanted = blocks.reference(tensors, taps, table[text[-1]], table[3], [None, None], False)
        torch.testing.assert_close(block.states, wanted, atol=2e-4, rtol=2e-4)
        first, second = (tensors[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
        for state in wanted:
            path.append(int((state @ model.lm_head.weight.T + second @ first[path[-1]]).argmax()))
    assert tree.tokens.tolist() == path


# DFlash2 -------------------------------------------------------------------------------------------------------------

SECONDS = {
    "Z Lab": {},
    "window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "speculators": {
        "speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"], "is_causal": None,
        "layer_types": ["sliding_attention"] * 2, "sliding_window": 6,
    },
    "scaled": {"output_multiplier": 0.5, "final_logit_softcapping": 2.0, "selector_vocab_size": 300},
}  # fmt: skip


@pytest.mark.parametrize("name", SECONDS)
def test_a_dflash2_file_computes_and_chooses_what_its_authors_do(world, tmp_path, name):
    """In blocks of several rows at once, which convolutions do not mix; then token after token among the best."""
    model, more = world.model, SECONDS[name]
    windows = [(6 if "sliding" in kind else None) for kind in more.get("layer_types", ["full"] * 2)]
    made = registry.create(f"dflash:{blocks.save(tmp_path, model, 'second', **more)},tree=0,stop=fixed")
    assert isinstance(made, DFlash)
    made.bind(world.target)
    drafts = [begun(world.target, made, text, n) for n, text in enumerate(world.prompts[:3])]
    filled = made.model.fill(drafts)
    proposals = made.proposer.propose(drafts)
    t, table = blocks.second_tensors(model), model.model.embed_tokens.weight.detach()
    before, after, project = (t[f"candidate_selector.{part}"] for part in (
        "predecessor_codebook", "successor_codebook", "hidden_projection.weight"))  # fmt: skip
    scale, cap = more.get("output_multiplier", 1.0), more.get("final_logit_softcapping", 0.0)
    alone = []
    for text, block, (tree, _) in zip(world.prompts[:3], filled, proposals, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            taps = torch.cat([hidden[i + 1][0] for i in blocks.IDS], -1)
            z = blocks.reference(t, taps, table[text[-1]], table[3], windows, False)[1:]
            torch.testing.assert_close(block.states, z, atol=2e-4, rtol=2e-4)
            logits = z @ model.lm_head.weight.T * scale
            logits = cap * (logits / cap).tanh() if cap else logits
            logits[:, more.get("selector_vocab_size", models.VOCAB_SIZE) :] = -torch.inf
        token, path = text[-1], []
        for state, of_slot in zip(z, logits, strict=True):
            values, best = of_slot.topk(blocks.BEST)
            token = int(best[(values + after[best] @ (before[token] * (project @ state))).argmax()])
            path.append(token)
        assert tree.tokens[1:].tolist() == path
        alone.append([int(row.argmax()) for row in logits] == path)
    assert not all(alone), "the token before has a say"


def test_an_untrained_dflash2_drafter_is_its_dflash_drafter(world, tmp_path):
    """Bit for bit, as chains and trees."""
    tensors = blocks.second_tensors(world.model, untrained=True)
    folders = {"first": (blocks.config(world.model), blocks.random_tensors(world.model)),
               "second": (blocks.second(world.model), tensors)}  # fmt: skip
    found = []
    for name, (config, given) in folders.items():
        write(tmp_path / name, config, given)
        made = drafter(replace(world, folder=tmp_path), name, tree=0, stop="fixed")
        made.bind(world.target)
        draft = begun(world.target, made, world.prompts[0])
        (block,) = made.model.fill([draft])
        [(tree, _)] = made.proposer.propose([draft])
        found.append((block.states, tree.tokens.tolist()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("entry", "value", "says"),
    [
        ("conv_group_size", 5, "conv_group_size is 5, which does not divide a width of 64"),
        ("selector_vocab_size", "x", "selector_vocab_size is 'x'"),
        ("sample_from_anchor", True, "DFlash2's first position drafts nothing"),
        ("selector_rank", 4, "hidden_projection.weight is [8, 64] where [4, 64] is wanted"),
        ("draft_vocab_size", 9, "markov_w2.weight is [320, 8] where [9, 8] is wanted"),
    ],
)
def test_a_dflash2_file_that_would_draft_badly_is_refused(world, tmp_path, entry, value, says):
    config = blocks.second(world.model)
    config = config | {"dflash_config": config["dflash_config"] | {entry: value}}
    with pytest.raises(MethodError) as error:
        registry.create(f"dflash:{write(tmp_path, config, blocks.second_tensors(world.model))}").bind(world.target)
    assert says in str(error.value)


@pytest.mark.parametrize("options", ["tree=0", "tree=9,width=3", "tree=0,vocab={few}", "dtype=int8"])
def test_dflash2_keeps_the_targets_text(world, tmp_path, options):
    save_vocabulary(few := tmp_path / "few.safetensors", Vocabulary(torch.arange(1, models.VOCAB_SIZE, 2)))
    path, params = blocks.save(tmp_path / "head", world.model, "second"), SamplingParams(max_tokens=12)
    plain = [one.tokens for one in Engine(world.target).generate(world.prompts[:3], params)]
    out = Engine(world.target, f"dflash:{path},{options.format(few=few)}").generate(world.prompts[:3], params)
    assert [one.tokens for one in out] == plain
    assert sum(one.stats.draft_tokens for one in out) > 0


# Trees ---------------------------------------------------------------------------------------------------------------


def test_the_best_paths_are_the_best_of_all():
    """Against all paths there are, with ties and positions that are sure; a set has every parent and better sibling."""
    rng = np.random.default_rng(0)
    for trial in range(300):
        depth, ranks, count = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(0, 20))
        table = -np.sort(-rng.dirichlet(np.ones(ranks + 1), (depth, ranks))[..., :ranks], -1)
        table[rng.random(depth) < 0.3] = np.round(table[0], 1)
        table[rng.random(depth) < 0.2] = np.eye(ranks)[0]

        def below(path, table=table):
            """Shares by the position and by the rank before."""
            if len(path) == len(table):
                return []
            return [share for share in table[len(path), path[-1] if path else 0].tolist() if share > 0]

        found = best_first(below, count)
        every = {}
        for size in range(1, depth + 1):
            for path in itertools.product(range(ranks), repeat=size):
                given = (path[d - 1] if d else 0 for d in range(size))
                every[path] = float(np.prod([table[d, g, path[d]] for d, g in enumerate(given)]))
        best = sorted((value for value in every.values() if value > 0), reverse=True)[:count]
        assert sorted(found.values(), reverse=True) == list(found.values())
        np.testing.assert_allclose(list(found.values()), best, err_msg=str(trial))
        for path in found:
            assert path[:-1] in found or len(path) == 1
            assert not path[-1] or (*path[:-1], path[-1] - 1) in found


def test_trees_end_where_an_answer_does(world):
    made = drafter(world, tree=40)
    made.bind(world.target)
    draft = begun(world.target, made, world.prompts[0])
    [(tree, _)] = made.proposer.propose([draft])
    assert (len(tree), tree.calls) == (41, 1)
    assert (tree.chances[1:] <= tree.chances[tree.parent[1:]] + 1e-12).all()
    first = int(tree.tokens[1])
    assert 1 in tree.parent
    params = replace(draft.row.params, stop_token_ids=(first,))
    ended = Row(0, draft.row.tokens, params, max_context=world.target.max_context)
    [(tree, _)] = made.proposer.propose([replace(draft, row=ended)])
    node = tree.tokens.tolist().index(first)
    assert node not in tree.parent


# Files ---------------------------------------------------------------------------------------------------------------

WRONG = {
    "the last layer": ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 3]}}, "whose last output is not"),
    "another depth": ({"num_target_layers": 36}, "reads states of layers 0, 2 of 36"),
    "no layout": ({"architectures": ["Drafter"]}, "does not say sample_from_anchor"),
    "a doubtful layout": ({"speculators_model_type": "dspark"}, "does not say sample_from_anchor"),
    "an index past the end": ({"dflash_config": {"target_layer_ids": [0, 99]}}, "reads states of layers 0, 99 of 4"),
    "no layers": ({"dflash_config": {"mask_token_id": 3}}, "does not say target_layer_ids: the layers of its target"),
    "one layer's index": ({"dflash_config": {"target_layer_ids": 3}}, "reads states of layers 3 of 4"),
    "no block": ({"block_size": None}, "block_size is None"),
    "an empty block": ({"block_size": 0}, "block_size is 0; a whole number from 2 to 64"),
    "a huge block": ({"block_size": 10**9}, "block_size is 1000000000"),
    "a mask beyond the vocabulary": (
        {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": models.VOCAB_SIZE}},
        "has neither a tensor mask_embedding nor a mask_token",
    ),
    "a mask that is no number": (
        {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": True}},
        "has neither a tensor mask_embedding nor a mask_token",
    ),
    "a rank that is no number": ({"markov_rank": "8"}, "markov_rank is '8'"),
    "a rank without a head": ({"markov_rank": 8}, "has no markov_head.markov_w1.weight"),
    "countless layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "layers of one kind too few": ({"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; 2 of"),
    "a window of nothing": ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "sliding_window is 0"),
    "a vocabulary beyond the target's": ({"draft_vocab_size": 10**9}, "drafts 1000000000 tokens"),
    "a group that is a text": ({"dflash_config": "x"}, "dflash_config is no group of named entries"),
    "no theta": ({"rope_theta": "x"}, "rope_theta is 'x'"),
    "no mask": (
        {"dflash_config": {"target_layer_ids": [0, 2]}},
        "has neither a tensor mask_embedding nor a mask_token",
    ),
    "a scaled embedding": ({"input_embedding_scale": 2.0}, "input_embedding_scale is 2.0, which nothing here applies"),
    "a softcap that is no number": ({"final_logit_softcapping": "20"}, "final_logit_softcapping is no number"),
    "DFlash2 without its tensors": ({"architectures": ["DFlash2DraftModel"]}, "selector_rank is None; a whole number"),
    "DFlash2 of one entry": ({"dflash_config": {"selector_rank": 8}}, "selector_top_k is None; a whole number"),
    "a gated head": ({"markov_rank": 4, "markov_head_type": "gated"}, "asks for a gated Markov head"),
    "a head that is not there": ({"enable_confidence_head": True}, "has no confidence_head.proj"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_would_draft_badly_is_refused(world, tmp_path, name):
    more, says = WRONG[name]
    with pytest.raises(MethodError) as error:
        registry.create(f"dflash:{blocks.save(tmp_path, world.model, 'random', **more)}").bind(world.target)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_markov_head_of_another_rank_is_refused(world, tmp_path):
    with pytest.raises(MethodError, match=r"markov_w1.weight is \[\d+, 64\] where \[\d+, 3\] is wanted"):
        registry.create(f"dflash:{blocks.save(tmp_path, world.model, markov_rank=3)}").bind(world.target)


def with_heads(tensors, model, keep):
    members = torch.zeros(models.VOCAB_SIZE, dtype=torch.bool)
    members[keep] = True
    own = {"lm_head.weight": model.lm_head.weight.detach()[keep].clone(), "d2t": keep - torch.arange(len(keep))}
    return tensors | own | {"t2d": members, "embed_tokens.weight": model.model.embed_tokens.weight.detach().clone()}


def test_layouts_of_the_same_drafter_draft_alike(world, tmp_path):
    """Z Lab's, and that of speculators: inputs counted instead of outputs, a nested configuration, a vocabulary of its
    own with its rows of the head, or those of the target."""
    model, keep = world.model, torch.arange(1, models.VOCAB_SIZE, 2)
    tensors, flat = blocks.random_tensors(model), blocks.config(model)
    nested = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": flat | {"model_type": "llama"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in blocks.IDS],
        "block_size": blocks.BLOCK,
        "mask_token_id": 3,
        "sample_from_anchor": False,
        "draft_vocab_size": len(keep),
    }
    own = with_heads(tensors, model, keep)
    shared = {name: tensor for name, tensor in own.items() if name != "lm_head.weight"}
    save_vocabulary(tmp_path / "odd.safetensors", Vocabulary(keep))
    trees = []
    for name, config, given, more in (
        ("z-lab", flat, tensors, f",vocab={tmp_path / 'odd.safetensors'}"),
        ("speculators", nested, own, ""),
        ("shared", nested, shared, ""),
    ):
        made = registry.create(f"dflash:{write(tmp_path / name, config, given)},tree=9{more}")
        assert isinstance(made, DFlash)
        made.bind(world.target)
        trees += made.propose(asked(begun(world.target, made, world.prompts[0]).row))
    one, *others = trees
    assert len(one) == 10
    assert set(one.tokens[1:].tolist()) <= set(keep.tolist())
    for other in others:
        assert other.tokens.tolist() == one.tokens.tolist()
        assert other.parent.tolist() == one.parent.tolist()
