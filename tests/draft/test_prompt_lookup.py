"""Three rules of prompt lookup, each against its own program."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from paceline.draft.methods.prompt_lookup import PromptLookup, PromptLookupConfig
from tests.draft.rows import draft_of, row, target


def lookup(text, **options):
    return draft_of(PromptLookup(PromptLookupConfig(**options)), text)


# The rules as their programs have them, in plain Python.


def published(text, max_ngram, draft):
    for n in range(max_ngram, 0, -1):
        for i in range(len(text) - n + 1):
            start = i + n
            apart = start < len(text) - n
            if text[i:start] == text[len(text) - n :] and start + draft <= len(text) and apart:
                return text[start : start + draft]
    return []


def vllm(text, min_ngram, max_ngram, draft):
    """Borders of the reversed text by Knuth, Morris and Pratt; the last of the longest is the earliest in the text."""
    reverse = text[::-1]
    borders = [0] * max_ngram
    border = longest = at = 0
    i = 1
    while i < len(reverse):
        if reverse[border] == reverse[i]:
            border += 1
            if border >= longest:
                longest, at = border, i
            if i < max_ngram:
                borders[i] = border
            if border == max_ngram:
                border = borders[max_ngram - 1]
            i += 1
        elif border:
            border = borders[border - 1]
        else:
            i += 1
    start = len(text) - 1 - at + longest
    return text[start : start + draft] if longest >= min_ngram else []


def transformers(text, max_ngram, draft, eos):
    """transformers itself."""
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([eos]), num_output_tokens=draft, max_matching_ngram_size=max_ngram, max_length=10_000
    )
    candidates, _ = generator.get_candidates(torch.tensor([text]))
    return candidates[0, len(text) :].tolist()


TEXT = st.integers(1, 6).flatmap(lambda k: st.lists(st.integers(0, k), min_size=1, max_size=60))


@settings(max_examples=150)
@given(TEXT, st.integers(1, 5), st.integers(1, 12))
def test_published(text, longest, draft):
    config = PromptLookupConfig(max_ngram=longest, draft=draft)
    assert PromptLookup(config).lookup(np.array(text)).tolist() == published(text, longest, draft)


@settings(max_examples=150)
@given(TEXT, st.integers(1, 4), st.integers(0, 4), st.integers(1, 12))
def test_vllm(text, shortest, more, draft):
    config = PromptLookupConfig("vllm", draft, shortest + more, shortest)
    assert PromptLookup(config).lookup(np.array(text)).tolist() == vllm(text, shortest, shortest + more, draft)


@settings(max_examples=100)
@given(TEXT, st.integers(1, 5), st.integers(1, 12))
def test_transformers(text, longest, draft):
    eos = 1
    drafter = PromptLookup(PromptLookupConfig("transformers", draft, longest))
    drafter.bind(target(eos=chr(eos)))
    expected = "".join(map(chr, transformers(text, longest, draft, eos)))
    assert draft_of(drafter, "".join(map(chr, text)), eos=chr(eos)) == expected


def test_less_than_a_full_draft_behind_the_match():
    assert lookup("xyzxyz") == ""
    assert lookup("xyzxyz", variant="transformers") == "xyz"
    assert lookup("xyzxyz", variant="vllm", min_ngram=1, max_ngram=5, draft=4) == "xyz"


def test_published_skips_a_place_too_near_the_end():
    # "bcd" at 1 would be copied from, but the 2 tokens behind it overlap what was matched.
    assert lookup("abcdxbcd", draft=1) == "x"
    assert lookup("abcdbcd", draft=1) == "b"
    assert lookup("aa", draft=1) == ""
    assert lookup("aa", variant="transformers", draft=1) == "a"


def test_defaults_are_each_program_s_own():
    assert PromptLookupConfig().ngrams == (1, 3)
    assert PromptLookupConfig("transformers").ngrams == (1, 2)
    assert PromptLookupConfig("vllm").ngrams == (5, 5)
    assert PromptLookupConfig("vllm", max_ngram=3).ngrams == (3, 3)
    assert PromptLookupConfig("vllm", min_ngram=2).ngrams == (2, 2)
    assert PromptLookupConfig("vllm", min_ngram=2, max_ngram=4).ngrams == (2, 4)


def test_only_transformers_stops_before_an_end_token():
    text = "xxab.cdab"
    for variant, expected in [("published", ".c"), ("transformers", ""), ("vllm", ".c")]:
        drafter = PromptLookup(PromptLookupConfig(variant, draft=2, max_ngram=2, min_ngram=1))
        drafter.bind(target(eos="."))
        assert draft_of(drafter, text, eos=".") == expected
    assert draft_of(PromptLookup(PromptLookupConfig("transformers")), text, stop_token_ids=[ord("c")]) == "."
    drafter = PromptLookup(PromptLookupConfig("transformers"))
    drafter.bind(target(eos="."))
    assert draft_of(drafter, text, eos=".", ignore_eos=True) == ".cdab"


def past(variant, requests, text, memory=100, finish="stop", **options):
    """What is offered behind `text` after `requests` have ended."""
    drafter = PromptLookup(PromptLookupConfig(variant, past=memory, **options))
    for id, request in enumerate(requests):
        one = row(request, id=id)
        drafter.start(one)
        one.finish_reason = finish
        drafter.drop(one)
    return draft_of(drafter, text)


@pytest.mark.parametrize(("variant", "options"), [("transformers", {}), ("vllm", {"min_ngram": 1, "max_ngram": 2})])
def test_finished_requests_are_searched_for_longer_matches(variant, options):
    assert past(variant, ["xabcd"], "yab", **options) == "cd"
    assert past(variant, ["xabcd"], "abzab", **options) == "zab", "the text's own match is as long"
    assert past(variant, ["xabcd"], "bzab", **options) == "cd", "the text's own match is shorter"
    assert past(variant, ["xabcd", "xabef"], "yab", **options) == "ef", "the latest first"
    assert past(variant, ["a", "bc"], "yab", **options) == "c", "no match across two requests"
    assert past(variant, ["xabcd"], "yab", finish="abort", **options) == ""
    assert past(variant, ["xabcd"], "yab", memory=0, **options) == ""


def test_published_wants_a_full_draft_behind_past_matches_too():
    assert past("published", ["abcd"], "yab", draft=2) == "cd"
    assert past("published", ["abcd"], "yab", draft=4) == ""
