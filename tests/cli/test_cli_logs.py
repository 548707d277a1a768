"""Logs through the command line: streams that were kept, and standard input."""

import json

from tests.logs.test_bodies import ASKED, delta, stream


def replayed(command, tiny, source, stdin=b""):
    done = command("replay", source, "--tokenizer", tiny, "--template", "chatml", "-d", "sam", "--json", stdin=stdin)
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    (one,) = [result for result in facts["results"] if result["category"] == "overall"]
    return {name: one[name] for name in ("new_tokens", "rounds", "mean_accepted_tokens")}


def test_a_stream_that_was_kept_is_one_answer_not_its_events(tiny, tmp_path, command):
    """The text of a proxy, read as an answer, would repeat itself and draft well. Standard input says the same."""
    words = [f" w{n}" for n in range(40)]
    lines = [
        json.dumps({"request": {"messages": ASKED}, "response": response})
        for response in ("".join(words), stream(*(delta(content=word) for word in words)))
    ]
    whole, streamed = tmp_path / "whole.jsonl", tmp_path / "streamed.jsonl"
    whole.write_text(lines[0] + "\n")
    streamed.write_text(lines[1] + "\n")
    right = replayed(command, tiny, whole)
    assert replayed(command, tiny, streamed) == right
    assert replayed(command, tiny, "-", streamed.read_bytes()) == right
