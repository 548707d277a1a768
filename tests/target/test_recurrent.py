"""Recurrent state: the same in any tree, piece, batch and forward; kept, given back and taken over without a trace."""

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests import drafters, exact, models, native
from tests.draft import mtps
from tests.plain import generate
from tests.preempting import preempt_often

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.engine import seats
from paceline.engine.engine import Engine
from paceline.engine.prefixes import Prefixes, spread
from paceline.errors import ModelError
from paceline.formats.shape import TILED
from paceline.target.load import load, quantise_folder
from paceline.target.recurrent import State

NEW = 14


def text(seed, length):
    return np.random.default_rng(seed).integers(4, models.VOCAB_SIZE, length).tolist()


def decoder(family="qwen3.5", dtype=torch.float32, **changes):
    return native.of(models.model(family, max_position_embeddings=512, **changes), dtype, eos=())


# One forward ---------------------------------------------------------------------------------------------------------


def walk(target):
    """Logits of rows that run pieces, trees in two parts, drafts that are rejected, and paths through trees."""
    rng, found = np.random.default_rng(0), []
    slots = [target.add_row(1) for _ in range(3)]
    for slot, length in zip(slots, (1, 9, 40), strict=True):
        target.cache.mark(slot, 7)
        target.verify([Segment.chunk(slot, np.array(text(slot, length)), last=True)])
        target.commit(slot, range(length))
    for turn in range(6):
        parents = [[-1], [-1, 0, 0, 1, 0, 3], [-1, 0, 1, 1, 2, 0, 5]]
        trees = [exact.tree(slot, text(turn, len(p)), p) for slot, p in zip(slots, parents, strict=True)]
        if turn % 2:
            first = [Segment(t.slot, t.tokens[:cut], t.parent[:cut], num_logits=cut) for t, cut in ((trees[2], 4),)]
            found.append(target.verify(first).logits)
            trees[2].start, trees[2].num_logits = 4, 3
        found.append(target.verify([*trees, Segment.chunk(target.add_row(1), np.array(text(9, 20)), True)]).logits)
        target.drop_row(3)
        for slot, paths in zip(slots, ([[0]], [[0], [0, 1, 3, 5]], [[0, 5, 6], [0, 1, 2, 4]]), strict=True):
            target.commit(slot, paths[int(rng.integers(len(paths)))])
    return torch.cat(found)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("family", models.HYBRID)
def test_compiled_code_does_what_torch_does(family, tiled):
    """tiled: value heads are in the order of GGUF files."""
    here, there = (decoder(family, **{TILED: tiled}) for _ in range(2))
    assert here.cache.recurrent is not None
    assert there.cache.recurrent is not None
    assert here.cache.recurrent.is_compiled
    there.cache.recurrent.is_compiled = False
    torch.testing.assert_close(walk(here), walk(there), atol=2e-4, rtol=1e-4)
    for slot in range(3):
        states = [target.cache.states(slot) for target in (here, there)]
        assert states[0].keys() == states[1].keys()
        assert 7 in states[0] or slot == 0
        for length, state in states[0].items():
            torch.testing.assert_close(state.matrices, states[1][length].matrices, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(state.inputs, states[1][length].inputs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_states_are_the_same_to_the_last_bit(dtype):
    target, tokens = decoder("qwen3-next", dtype), text(1, 90)
    target.make_exact()
    alone = exact.one_by_one(target, tokens)
    for sizes in ([90], [37, 1, 2, 50]):
        assert torch.equal(exact.in_pieces(target, tokens, sizes), alone)
    rng, [slot] = np.random.default_rng(2), exact.prepared(target, [tokens[:60]])
    for begin, cut in ((60, 3), (66, 0), (72, 9)):
        drafted, parents, nodes = exact.hidden_in_tree(rng, tokens[begin : begin + 6], 14, models.VOCAB_SIZE)
        tree = exact.tree(slot, drafted, parents)
        if cut:
            target.verify([exact.tree(slot, drafted[:cut], parents[:cut])])
            tree.start = cut
        tree.num_logits -= cut
        logits = target.verify([tree]).logits
        late = [i for i, node in enumerate(nodes) if node >= cut]
        assert torch.equal(logits[[nodes[i] - cut for i in late]], alone[[begin + i for i in late]])
        target.commit(slot, nodes)
    assert torch.equal(target.verify([exact.tree(slot, tokens[78:80], [-1, 0])]).logits, alone[78:80])


def test_rows_and_nodes_that_wait_are_moved_and_gone_on_from():
    """As by a drafter that drafts for several outcomes, and keeps what it ran for the one that came."""
    target, t = decoder(), text(1, 30)
    target.make_exact()
    alone, [other, slot] = exact.one_by_one(target, t), exact.prepared(target, [t[:9], t[:20]])
    target.drop_row(other)
    assert target.cache.reshape(1, 64) == {slot: other}
    slot = other
    for mark in (21, 22):  # inside the path, and at its end
        target.cache.mark(slot, mark)
    target.verify([exact.tree(slot, [t[20], 5, t[21], 6, t[22], t[23]], [-1, 0, 0, 1, 2, 4])])
    target.commit(slot, [0, 2])
    target.cache.arrange(slot, [2, 3])
    later = exact.tree(slot, t[22:25], [-1, 0, 1])
    later.start, later.num_logits = 2, 1
    assert torch.equal(target.verify([later]).logits, alone[24:25])
    target.commit(slot, [0, 1, 2])
    assert torch.equal(target.verify([exact.tree(slot, t[25:26], [-1])]).logits, alone[25:26])
    states = target.cache.states(slot)
    assert states.keys() == {21, 22, 25}
    for mark in (21, 22):
        taken = target.add_row(mark)
        target.cache.paste(taken, target.cache.copy(slot, mark), states[mark])
        assert torch.equal(target.verify([exact.tree(taken, t[mark : mark + 1], [-1])]).logits, alone[mark : mark + 1])


def test_in_bfloat16_it_is_nearly_the_model():
    half, single = decoder(dtype=torch.bfloat16), decoder()
    tokens = text(5, 60)
    out = [exact.in_pieces(target, tokens, [30, 7, 23]).float() for target in (half, single)]
    assert native.off(*out) < 0.05


def test_a_prompt_is_committed_whole_and_nothing_is_forgotten():
    target = decoder()
    slot = target.add_row(8)
    target.verify([Segment.chunk(slot, np.array(text(0, 8)), last=False)])
    with pytest.raises(ValueError, match="of 8 tokens is committed whole, not 5"):
        target.commit(slot, range(5))
    target.commit(slot, range(8))
    with pytest.raises(ValueError, match="cannot forget"):
        target.truncate(slot, 7)


# Rows that come and go -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=models.HYBRID)
def world(request):
    """A model, prompts of which most begin alike, and what transformers writes after them."""
    model = models.model(request.param)
    model.generation_config.eos_token_id = None
    start = text(3, 40)
    prompts = [text(4, 21), start + text(5, 9), start + text(6, 20), start[:30] + text(7, 5), [*start], text(8, 2)]
    answers = [generate(model, prompt, NEW, ())[len(prompt) :] for prompt in prompts]
    return native.of(model, eos=()), prompts, answers


@pytest.mark.parametrize("branches", [0, 2])
def test_answers_are_transformers_own(world, branches):
    """Steps without drafts after accepted ones, rows that join and are preempted, prefixes that are hit."""
    target, prompts, answers = world
    known = {tuple(p): [*p, *answer] for p, answer in zip(prompts, answers, strict=True)}
    for batch, chunk, turns in ((1, 512, 1), (5, 16, 2)):
        drafter = drafters.Idle(known, error=0.2, branches=branches)
        engine = Engine(target, drafter, max_batch=batch, prefill_chunk=chunk)
        if batch > 1:
            preempt_often(engine)
        for turn in range(turns):
            out = engine.generate(prompts, SamplingParams(max_tokens=NEW))
            assert [done.tokens for done in out] == answers
            assert sum(sum(done.stats.accepted[1:]) for done in out) > 0
            assert sum(done.reused for done in out) > 0 or not turn


def test_what_is_reused_ends_where_texts_part(world):
    target, prompts, answers = world
    engine = Engine(target, "sam")
    wish = SamplingParams(max_tokens=NEW)
    reused = [engine.generate([prompts[i]], wish)[0].reused for i in (1, 2, 1, 2, 4)]
    # The second leaves the first after 40 tokens: there it keeps a state, which the last one would have; one token is
    # always run, so it has that before its last. The same prompts again have all but their last tokens.
    assert reused == [0, 0, 48, 59, 0]
    more = [*prompts[1], *answers[1]]
    assert engine.generate([[*more, 5, 6]], wish)[0].reused == len(more) - 1, "the state at a row's end"
    other = [*prompts[1][:40], *text(11, 9)]
    (again,) = engine.generate([other], wish)
    assert again.reused == 40
    assert again.tokens == Engine(target).generate([other], wish)[0].tokens


def test_rows_that_begin_alike_share_one_state(world):
    target, prompts, answers = world
    out = Engine(target, "recycling", max_batch=6).generate(prompts, SamplingParams(max_tokens=NEW))
    assert [done.tokens for done in out] == answers
    assert [done.reused for done in out][:3] == [0, 0, 40]


def test_of_a_row_that_has_gone_on_the_state_at_the_shared_length_is_taken(world):
    """It has several by then: at the ends of prompts that others shared with it, and its present one."""
    target, prompts, _ = world
    start, wish = prompts[1], SamplingParams(max_tokens=NEW)
    others = [[*start[:30], *text(12, 4)], [*start, *text(13, 6)]]
    alone = [Engine(target, reuse=False).generate([one], wish)[0].tokens for one in others]
    engine = Engine(target, max_batch=4)
    engine.generate([[*start[:30], *text(14, 3)]], wish)  # so that the next row keeps a state after 30 tokens
    lead = engine.add(start, SamplingParams(max_tokens=40))
    while lead.num_new < 6:
        engine.step()
    assert len(target.cache.states(lead.slot)) > 2
    rows = [engine.add(one, wish) for one in others]
    engine.finish([lead, *rows])
    assert [row.reused for row in rows] == [30, len(start) - 1]
    assert [row.tokens[row.prompt_length :].tolist() for row in rows] == alone


def test_prefixes_keep_few_states_and_count_each_once():
    target = decoder()
    states, prefixes = target.cache.recurrent, Prefixes(8, 4)
    assert states is not None
    tokens, kv = np.arange(90), torch.zeros(1, 2, 2, 90, 16)
    for end in (20, 40, 90):
        kept = {n: states.empty() for n in (end - 3, end)}
        prefixes.add(tokens[:end], kv[:, :, :, :end], kept)
    assert len(prefixes) == 1
    assert prefixes.nbytes == kv.nbytes + 4 * states.nbytes
    assert [prefixes.best(tokens[:n])[0] for n in (90, 89, 60, 39, 37, 36)] == [90, 87, 40, 37, 37, 0]
    prefixes.add(np.append(tokens[:50], 1), kv[:, :, :, :51], {})
    assert [prefixes.best(np.append(tokens[:50], n))[0] for n in (1, 50)] == [40, 40]
    assert prefixes.nbytes == kv.nbytes + kv[:, :, :, :51].nbytes + 4 * states.nbytes, "both have those at 37 and 40"
    for _ in range(2):
        prefixes.forget()
    assert prefixes.nbytes == 0


def test_of_many_states_the_last_are_kept_and_others_far_apart():
    states = {n: State(torch.zeros(1), torch.zeros(1)) for n in (10, 20, 900, 910, 30, 1000, 2000, 5, 3000)}
    assert [*spread(states, 7)] == [20, 900, 910, 1000, 2000, 5, 3000]
    assert [*spread(states, 4)] == [1000, 2000, 5, 3000]
    assert [*spread(states, 9)] == [*states]


class Session:
    """A conversation whose template invites an answer by other tokens than those before an answer that was given."""

    system, invitation, given = text(20, 70), text(21, 9), text(22, 5)

    def prompt(self, turns, begins=30):
        answers = [[*self.given, *text(60 + i, 8)] for i in range(turns)] + [self.invitation]
        said = (one for i, answer in enumerate(answers) for one in (*text(begins + i, 17), *answer))
        return [*self.system, *said]

    def wish(self, prompt):
        return SamplingParams(max_tokens=5, branches=(len(self.system), len(prompt) - len(self.invitation)))


def test_each_turn_of_a_conversation_goes_on_from_the_one_before():
    """Also after another conversation with the same system message, and after an earlier turn is asked again."""
    target, session = decoder(), Session()
    engine, system = Engine(target), len(session.system)

    def reused(prompt):
        (out,) = engine.generate([prompt], session.wish(prompt))
        assert out.tokens == Engine(target).generate([prompt], session.wish(prompt))[0].tokens
        return out.reused

    ends = [len(session.prompt(turns)) - len(session.invitation) for turns in range(6)]
    assert [reused(session.prompt(turns)) for turns in range(3)] == [0, ends[0], ends[1]]
    assert reused(session.prompt(2, begins=80)) == system
    assert reused(session.prompt(3)) == ends[2]
    assert reused(session.prompt(3, begins=80)) == ends[2]
    assert reused(session.prompt(1)) == len(session.prompt(1)) - 1
    assert reused(session.prompt(5)) == ends[3]


def test_a_long_prompt_keeps_states_on_its_way(monkeypatch):
    monkeypatch.setattr(seats, "STRIDE", 32)
    engine, prompt, wish = Engine(decoder()), text(5, 300), SamplingParams(max_tokens=3)
    engine.generate([prompt], wish)
    stride = 300 // seats.STRIDES + 1
    for shared, expected in ((250, 6 * stride), (100, 2 * stride), (stride - 1, 0)):
        assert engine.generate([[*prompt[:shared], 1, 2, 3]], wish)[0].reused == expected


def test_states_are_stored_for_later_processes(tmp_path):
    target, session, wish = decoder(), Session(), Session().wish

    def ask(prompt, **more):
        return Engine(target, prefix_cache=tmp_path / "c", **more).generate([prompt], wish(prompt))[0]

    first, later, other = session.prompt(0), session.prompt(1), session.prompt(0, begins=90)
    assert ask(first).reused == 0
    for prompt, reused in ((later, len(first) - 9), (other, len(session.system)), (later, len(later) - 1)):
        out = ask(prompt)
        assert out.reused == reused
        assert out.tokens == Engine(target).generate([prompt], wish(prompt))[0].tokens
    for path in (tmp_path / "c").glob("*.state"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for stray in ("x.state", "a-b-c.state", "a-b-c-d.state"):
        (tmp_path / "c" / stray).write_bytes(b"")
    out = ask(later)
    assert (out.reused, not list((tmp_path / "c").glob("*.part"))) == (0, True)
    assert ask(later).reused == len(later) - 1, "damaged files were written again"


@pytest.mark.parametrize("branches", [False, True])
def test_two_forwards_of_a_round_go_on_from_each_other(world, branches):
    """A drafter that runs the first layers itself, and drafts nothing in some rounds."""
    target, prompts, answers = world
    engine = Engine(target, drafters.EarlyExit(2, branch=branches), max_batch=5, prefill_chunk=16)
    out = preempt_often(engine).generate(prompts, SamplingParams(max_tokens=NEW))
    assert [done.tokens for done in out] == answers


@pytest.mark.parametrize("family", models.HYBRID)
def test_a_draft_model_with_states_is_accepted_whole_where_it_is_the_target(family, tmp_path):
    """And keeps few updates of a long prompt."""
    folder, wish = models.make(family, tmp_path), SamplingParams(max_tokens=21, ignore_eos=True)
    options = "stop=fixed,draft=4"
    for draft in (f"model:{folder},{options}", f"s2d:{folder},exits=2,3,thresholds=0.99,{options}"):
        engine = Engine(folder, draft, dtype="float32", device="cpu")
        row, most = engine.add(text(2, 60), wish), 0
        while engine.has_work:
            engine.step()
            network = engine.drafter.model.network
            states = [part.cache.recurrent for part in getattr(network, "sections", [network])]
            rows = [kept for of in states if of is not None for kept in of.rows.values()]
            most = max(most, *(kept.nodes.shape[1] for kept in rows), 0)
        assert row.stats.accepted == [1, 0, 0, 0, 4]
        assert most <= 32 or draft.startswith("s2d")


# Loading -------------------------------------------------------------------------------------------------------------


def test_memory_counts_states():
    target = decoder()
    plain, states = target.cache, target.cache.recurrent
    assert states is not None
    assert plain.nbytes_of(2, 64) == 2 * (64 * plain.token_bytes + 3 * states.nbytes)
    assert plain.kv.shape[0] == 1, "layers with a state have no keys and values"
    assert states.nbytes == 4 * 2 * (4 * 8 * 24 + 2 * (2 * 4 * 8 + 4 * 24))


@pytest.mark.parametrize("family", models.HYBRID)
def test_the_head_in_a_checkpoint_is_no_part_of_the_model_and_drafts_for_it(family, tmp_path):
    folder = mtps.add(models.make(family, tmp_path), mtps.random_head(models.model(family)))
    target, tokens = load(folder, native=True, exact=False), text(2, 20)
    said = exact.in_pieces(target, tokens, [20])
    assert torch.equal(said, exact.in_pieces(decoder(family), tokens, [20]))
    wish, prompts = SamplingParams(max_tokens=NEW, ignore_eos=True), [tokens, tokens[:5], tokens[3:9]]
    plain = [done.tokens for done in Engine(target).generate(prompts, wish)]
    for options in ("", ",tree=0,draft=3"):
        out = Engine(target, f"mtp{options}").generate(prompts, wish)
        assert [done.tokens for done in out] == plain
        assert sum(done.stats.draft_tokens for done in out) > 0


@pytest.mark.parametrize(("family", "kind"), [("qwen3.5", "Qwen3_5"), ("qwen3.5-moe", "Qwen3_5Moe")])
def test_the_text_of_a_model_that_reads_images_is_run(family, kind, tmp_path):
    """Published mixtures stack the experts of a layer."""
    inner = models.config(family).to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    tied = inner["tie_word_embeddings"]
    config = getattr(transformers, f"{kind}Config")(text_config=inner, vision_config=vision, tie_word_embeddings=tied)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    models.randomize(whole)
    whole.save_pretrained(tmp_path / "m")
    if inner.get("num_experts"):
        stacked = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
        assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in stacked
        save_file(stacked, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    tokens = text(2, 20)
    target = load(tmp_path / "m", native=True)
    with torch.no_grad():
        theirs = whole(input_ids=torch.tensor([tokens])).logits[0]
    said = exact.in_pieces(target, tokens, [20])
    torch.testing.assert_close(said, theirs, atol=1e-4, rtol=1e-4)
    quantise_folder(tmp_path / "m", tmp_path / "int8", "int8")
    assert str(load(tmp_path / "int8").quantised).startswith("Q8_0 and F32")


def test_what_is_not_run_says_why(tmp_path):
    folder = models.make("qwen3-next", tmp_path / "model")
    for schedule in ("equal", "grouped"):
        with pytest.raises(ModelError, match="a running state instead of attention"):
            Engine(folder, schedule=schedule)
    config = (folder / "config.json").read_text("utf-8")
    (folder / "config.json").write_text(config.replace('"linear_num_key_heads": 2', '"linear_num_key_heads": 3'))
    with pytest.raises(ModelError, match=r"linear_num_value_heads, 4, is no multiple of linear_num_key_heads, 3"):
        load(folder)
