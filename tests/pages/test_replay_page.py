"""The report as one page: complete, loading nothing, and never fooled by names."""

import re

from tests.pages.test_report import Seen

from paceline.replay.report import OVERALL, page


def result(draft, category, accepted, nodes, shares, **more):
    return {
        "draft": draft, "category": category, "mean_accepted_tokens": accepted, "answers": 3, "rounds": 10,
        "new_tokens": 20, "draft_rate": 0.5, "verified_per_round": nodes, "verified_per_token": nodes / accepted,
        "draft_us_per_round": 4.0, "accepted_by_depth": shares, **more,
    }  # fmt: skip


def told(results, **more):
    return {"trace": "log.jsonl", "tokenizer": "t", "template": None, "answers": 3, "complete": True, **more,
            "results": results}  # fmt: skip


TWO = [
    result("a,draft=5", "chat", 1.5, 4, [0.5, 0.2]), result("a,draft=5", OVERALL, 1.6, 4, [0.5, 0.2]),
    result("a,draft=9", "chat", 1.7, 7, [0.4, 0.2, 0.1]), result("a,draft=9", OVERALL, 1.8, 7, [0.4, 0.2, 0.1]),
]


OF_A = {"a,draft=5": "a", "a,draft=9": "a"}


def test_a_page_is_whole_and_loads_nothing():
    html = page(told(TWO) | {"variants": OF_A})
    tags = Seen(html).tags
    assert tags.count("svg") == 2
    assert not {"script", "link"} & set(tags)
    assert not re.search(r"https?:|url\(|\ssrc=", html)
    assert 'name="viewport"' in html
    for words in ("1.600", "1.800", "chat", "a,draft=9: 1.800 tokens from 7.0 nodes a round"):
        assert words in html
    assert "speed-up" not in html
    assert "Interrupted" not in html


def test_variants_of_one_drafter_are_one_line():
    one, two = (told(TWO) | {"variants": OF_A | of} for of in ({}, {"a,draft=9": "b"}))
    assert page(one).count("<path d=") == page(two).count("<path d=") - 1


def test_names_are_text():
    one = result("<b>&x", OVERALL, 1.5, 4, [0.5], predicted_speedup=1.25)
    html = page(told([one], complete=False) | {"variants": {"<b>&x": "<b>&x"}})
    assert "<b>&x" not in html
    assert "&lt;b&gt;&amp;x" in html
    assert "1.25" in html
    assert "Interrupted" in html
    Seen(html)


def test_a_page_of_nothing():
    assert "log.jsonl" in Seen(page(told([]) | {"variants": {}})).text
    assert "none" in Seen(page(told([result("none", OVERALL, 1.0, 1, [])]) | {"variants": {"none": "none"}})).text
