"""Prefixes on disk: read by later engines, with the same answers; damaged, foreign and old files do no harm."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import BLOCK, PrefixCache
from paceline.errors import PacelineError
from paceline.target.hf import HFTarget
from tests import models, native
from tests.draft import mtps

PROMPT = np.random.default_rng(1).integers(4, models.VOCAB_SIZE, 3 * BLOCK + 20).tolist()
SHARED = 3 * BLOCK
"""Tokens of PROMPT in whole blocks."""


def decoder(seed=0, dtype=torch.float32, exact=False):
    torch.manual_seed(seed)
    made = native.of(models.model("llama2", max_position_embeddings=1024, **native.TINY), dtype, eos=())
    if exact:
        made.make_exact()
    return made


def answer(target, folder, prompt=PROMPT, **options):
    """Of an engine of its own, as another process has."""
    engine = Engine(target, prefix_cache=folder, **options)
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=12))
    return done


def blocks(disk, tokens):
    """The files of all whole blocks of `tokens`."""
    assert disk is not None
    return [disk._block(key) for key in disk._keys(tokens, "")][1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
def test_a_later_engine_reads_only_what_is_new(tmp_path, dtype, exact):
    alone = answer(decoder(dtype=dtype, exact=exact), None)
    first = answer(decoder(dtype=dtype, exact=exact), tmp_path)
    again = answer(decoder(dtype=dtype, exact=exact), tmp_path)
    longer = answer(decoder(dtype=dtype, exact=exact), tmp_path, [*PROMPT, *PROMPT])
    other = answer(decoder(dtype=dtype, exact=exact), tmp_path, [7, *PROMPT])
    assert [one.reused for one in (alone, first, again, longer, other)] == [0, 0, SHARED, SHARED, 0]
    assert alone.tokens == first.tokens == again.tokens
    assert longer.tokens == answer(decoder(dtype=dtype, exact=exact), None, [*PROMPT, *PROMPT]).tokens


def test_a_block_is_reused_after_its_own_text_alone(tmp_path):
    """The first block is there, and so is the second one, after another first."""
    mixed = [*reversed(PROMPT[:BLOCK]), *PROMPT[BLOCK:]]
    answer(decoder(), tmp_path)
    answer(decoder(), tmp_path, [*mixed[:BLOCK], 7, 8])
    done = answer(decoder(), tmp_path, mixed)
    assert (done.reused, done.tokens) == (BLOCK, answer(decoder(), None, mixed).tokens)


def test_of_a_prompt_that_was_given_up_what_was_run_is_stored(tmp_path):
    engine = Engine(decoder(), prefix_cache=tmp_path, prefill_chunk=BLOCK + 5)
    row = engine.add(PROMPT)
    engine.step()
    engine.abort(row)
    done = answer(decoder(), tmp_path)
    assert (done.reused, done.tokens) == (BLOCK, answer(decoder(), None).tokens)


def test_is_of_one_model_dtype_and_exactness(tmp_path):
    answer(decoder(), tmp_path)
    changed = decoder()
    changed.weights_fingerprint = "another"
    for target in (changed, decoder(dtype=torch.bfloat16), decoder(exact=True)):
        assert answer(target, tmp_path).reused == 0
    assert answer(decoder(), tmp_path).reused == SHARED


def test_is_of_one_form_of_the_weights_and_one_processor_if_exact(monkeypatch):
    model, expanded = models.model("llama2"), native.of(models.model("llama2"))
    expanded.expanded = "float32, expanded from Q8_0"
    targets = [*(native.of(model, precision=precision) for precision in (None, "int8", "int4")), expanded]
    for target in targets:
        target.weights_fingerprint = "of all"
    assert len({target.prefix_key for target in targets}) == 4
    plain, exact = decoder(), decoder(exact=True)
    before = plain.prefix_key, exact.prefix_key
    monkeypatch.setattr("paceline.processor.name", lambda: "another")
    assert plain.prefix_key == before[0]
    assert exact.prefix_key != before[1]


def test_is_of_one_configuration(tmp_path):
    """The same weights with other rotary positions, or with another factor, have other keys and values."""

    def made(kind, theta=1e4, **changes):
        rope = {"rope_type": "default", "rope_theta": theta}
        changes = native.TINY | {"max_position_embeddings": 1024, "rope_parameters": rope} | changes
        return kind(models.model("llama2", **changes))

    for kind in (native.of, HFTarget):
        answer(made(kind), tmp_path)
        for change in ({"theta": 1.02e4}, {"rms_norm_eps": 1e-3}, {"max_position_embeddings": 2048}):
            assert answer(made(kind, **change), tmp_path).reused == 0
        assert answer(made(kind), tmp_path).reused == SHARED
    prefixes = [made(kind, theta=theta).prefix_key for kind in (native.of, HFTarget) for theta in (1e4, 1e6, 1.001e6)]
    assert len({*prefixes}) == 6


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_file_is_removed_with_one_line(tmp_path, damage, caplog):
    whole = answer(decoder(), tmp_path)
    paths = blocks(Engine(decoder(), prefix_cache=tmp_path).seats.disk, np.array(PROMPT))
    paths[1].write_bytes(damage(paths[1].read_bytes()))
    again = answer(decoder(), tmp_path)
    assert (again.reused, again.tokens) == (BLOCK, whole.tokens)
    assert [record.getMessage() for record in caplog.records] == [
        f"prefix_cache: {paths[1]} is damaged, and was removed"
    ]
    assert answer(decoder(), tmp_path).reused == SHARED, "it was written again"


def test_what_is_read_fits_into_the_memory_and_is_more_than_the_memory_has(tmp_path):
    answer(decoder(), tmp_path)
    target = decoder()
    tight = Engine(target, prefix_cache=tmp_path, cache_memory=2 * 192 * target.cache.token_bytes)
    tight.add(PROMPT, SamplingParams(max_tokens=12))
    tight.step()
    assert target.cache.nbytes + tight.room.prefixes.nbytes <= tight.room.budget
    disk, tokens = tight.seats.disk, np.array(PROMPT)
    assert disk.load(tokens, SHARED)[0].shape[3] == 0
    blocks(disk, tokens)[2].write_bytes(b"")
    assert disk.load(tokens, 2 * BLOCK)[0].shape[3] == 0
    assert disk.load(tokens, BLOCK)[0].shape[3] == 2 * BLOCK


def test_two_writers_at_once_and_readers_among_them(tmp_path):
    target, kv = decoder(), torch.randn(3, 2, 2, SHARED, 4)
    shape, tokens = (3, 2, 2, BLOCK, 4), np.array(PROMPT)

    def work(_):
        cache = PrefixCache(tmp_path, target, shape, 10**9)
        cache.store(tokens, lambda length: kv[:, :, :, :length])
        found = cache.load(tokens, 0).kv
        for path in list(tmp_path.iterdir())[:1]:
            path.unlink(missing_ok=True)
        return torch.equal(found, kv[:, :, :, : found.shape[3]])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))
    assert not list(tmp_path.glob("*.part"))


def test_what_was_used_longest_ago_goes_first(tmp_path):
    prompts = [[first, *PROMPT[:BLOCK]] for first in (10, 11, 12)]
    answer(decoder(), tmp_path, prompts[0])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    limit = {"prefix_cache_size": 2 * size}
    answer(decoder(), tmp_path, prompts[1], **limit)
    assert answer(decoder(), tmp_path, prompts[0], **limit).reused == BLOCK
    answer(decoder(), tmp_path, prompts[2], **limit)
    assert [answer(decoder(), tmp_path, prompt, **limit).reused for prompt in prompts[::2]] == [BLOCK, BLOCK]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * size


def test_a_new_folder_and_every_file_are_their_owners_alone(tmp_path):
    answer(decoder(), tmp_path / "new")
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "new", *(tmp_path / "new").iterdir()])


def drafted(target, folder, spec, prompt=PROMPT):
    engine = Engine(target, spec, prefix_cache=folder, budget=False)
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    return done


@pytest.mark.parametrize("family", ["llama2", "qwen3.5"])
def test_a_head_gets_the_states_of_what_is_read_from_disk(tmp_path, family):
    """It drafts as if it had seen all tokens run. Files of a drafter without states serve it no keys, and the other
    way they do; of two layers, one lacks none."""
    sizes = native.TINY if family == "llama2" else {}
    model = models.model(family, max_position_embeddings=1024, tie_word_embeddings=False, **sizes)
    head, kept = mtps.save(tmp_path / "head", mtps.knowing_head(model, 0.02)), tmp_path / "kept"
    target, whole = native.of(model, eos=()), len(PROMPT) - 1 if family == "qwen3.5" else SHARED
    plain = drafted(target, kept, "none")
    alone = drafted(target, None, f"mtp:{head}")
    first = drafted(target, kept, f"mtp:{head}")
    again = drafted(target, kept, f"mtp:{head}")
    longer = drafted(target, kept, f"mtp:{head}", [*PROMPT, *PROMPT])
    assert [one.reused for one in (plain, alone, first, again, longer)] == [0, 0, 0, whole, whole]
    assert plain.tokens == alone.tokens == first.tokens == again.tokens
    assert alone.stats.accepted == first.stats.accepted == again.stats.accepted
    assert alone.stats.draft_tokens == again.stats.draft_tokens > 0
    assert drafted(target, kept, "none").reused == whole
    for path in sorted(kept.glob("*.hidden"))[:1]:
        path.write_bytes(b"damaged")
    assert drafted(target, kept, f"mtp:{head}").tokens == plain.tokens
    assert drafted(target, kept, f"mtp:{head}").reused == whole, "it was written again"


def test_what_cannot_be(tmp_path):
    with pytest.raises(PacelineError, match="it needs reuse"):
        Engine(decoder(), prefix_cache=tmp_path, reuse=False)
    with pytest.raises(PacelineError, match=r"prefix_cache_size is .* such as 2GB"):
        Engine(decoder(), prefix_cache=tmp_path, prefix_cache_size="much")
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError, match="cannot be a folder"):
        Engine(decoder(), prefix_cache=tmp_path / "file")
