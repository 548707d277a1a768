"""A recording in shards: the same figures as in one piece."""

import gzip
import json

import pytest

from paceline.draft.recording import Recording
from paceline.logs.bodies import ConversationError
from paceline.logs.conversations import Reading, read_pieces, read_trace
from paceline.logs.transcript import Transcriber, open_tokenizer
from paceline.replay import corpus
from paceline.replay.report import Report
from paceline.replay.workers import Replayer, ShardedReplay, start
from paceline.textfiles import Piece, pieces_of

SPECS = ["sam", "suffix,past=1000", "prompt-lookup"]


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """A file in several pieces, and one that is gzipped. A category comes late, and one in the second file alone."""
    monkeypatch.setattr("paceline.textfiles.PIECE_BYTES", 400)
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_bytes(lines(16, ("even", "odd", "even", "odd", "late")))
    zipped.write_bytes(gzip.compress(lines(9, ("odd", "other"))))
    return [plain, zipped]


def lines(count, categories):
    said = ("the little cat", "and the dog sat", "on the mat;", "one two three one two")
    records = [
        {
            "prompt": said[i % 4] * 2, "response": (said[i % 3] + said[i % 4]) * (1 + i % 4),
            "category": categories[i * len(categories) // count],
        }
        for i in range(count)
    ]
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def pieces(which):
    return read_pieces(which, None, (), Reading(strict=True))


def figures(report):
    assert report.is_complete
    return [{k: v for k, v in result.items() if k != "draft_us_per_round"} for result in report.results()]


def whole(logs, vocabulary):
    reader = open_tokenizer(vocabulary)
    conversations = [*map(Transcriber(reader).conversation, read_trace(*logs))]
    report = Report(SPECS, conversations)
    for done in start(conversations, SPECS, Recording.of(reader)):
        report.add(done)
    return report


def test_the_figures_are_those_of_one_process(vocabulary, logs):
    job = ShardedReplay(logs, SPECS, str(vocabulary))
    shards, report = job.shards(), Report(SPECS)
    assert [list(shard.numbers) for shard in shards[:2]] == [[1], [0, 2]]
    assert len(shards[0].pieces) == len(shards) - 1 > 4
    for shard in shards:  # each by a worker of its own
        report.merge(Replayer(job)(shard), shard.numbers)
    assert (report.answers, figures(report)) == (25, figures(whole(logs, vocabulary)))


def test_a_shard_that_is_replayed_again_says_the_same(vocabulary, logs):
    job = ShardedReplay(logs, SPECS, str(vocabulary))
    worker, shard = Replayer(job), job.shards()[0]
    assert shard.numbers == [1]
    first, second = (figures(worker(shard)) for _ in range(2))
    assert first == second


def test_categories_are_chosen_in_every_shard(vocabulary, logs):
    job = ShardedReplay(logs, ["sam"], str(vocabulary), categories=["odd", "other"])
    report = Report(job.specs)
    for shard in job.shards():
        report.merge(Replayer(job)(shard), shard.numbers)
    chosen = read_trace(*logs, categories=["odd", "other"])
    assert report.answers == len(chosen) < 25


def test_pieces_are_whole_lines_with_their_numbers(logs):
    plain, zipped = logs
    every = [*pieces(pieces_of(plain, ConversationError))]
    assert every == read_trace(plain)
    assert [exchange.where for exchange in every] == [f"{plain}, line {i}" for i in range(1, 17)]
    assert [*pieces_of(zipped, ConversationError)] == [Piece(zipped)]


def test_an_end_of_blank_lines_is_no_error(logs, tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_bytes(lines(4, ("even",)) + b"\n" * 900)
    every = [*pieces_of(file, ConversationError)]
    assert ([*pieces(every[-1:])], len([*pieces(every)])) == ([], 4)


def test_an_empty_file_and_a_list_are_one(tmp_path):
    (tmp_path / "d.jsonl").touch()
    (piece,) = pieces_of(tmp_path / "d.jsonl", ConversationError)
    assert [*pieces([piece])] == []
    items = [json.loads(line) for line in lines(16, ("odd",)).splitlines()]
    (tmp_path / "e.json").write_text(json.dumps(items, indent=1))
    assert len([*pieces(pieces_of(tmp_path / "e.json", ConversationError))]) == 16


def test_lines_that_cannot_be_read_are_counted_once(vocabulary, logs):
    """The drafter that remembers reads all pieces, the others each of them."""
    logs[0].write_bytes(b"{\n" + logs[0].read_bytes().replace(b'"prompt": "and', b'"question": "and', 1))
    job = ShardedReplay(logs, SPECS, str(vocabulary))
    report, here = Report(SPECS), Reading()
    for shard in job.shards():
        report.merge(Replayer(job)(shard), shard.numbers)
    read_trace(*logs, reading=here)
    assert (report.reading, (here.lines, here.skipped, here.answered)) == (here, (26, 2, 24))
    assert "a.jsonl, line 1: not JSON" in here.first


def test_a_broken_line_is_named(logs):
    with logs[0].open("ab") as file:
        file.write(b"{\n")
    last = [*pieces_of(logs[0], ConversationError)][-1]
    with pytest.raises(ConversationError, match=r"a.jsonl, line 17: not JSON"):
        list(pieces([last]))
    with pytest.raises(ConversationError, match="cannot be read"):
        list(pieces_of(logs[0].with_name("none"), ConversationError))


def test_a_corpus_of_shards_has_the_documents_of_one_process(vocabulary, logs, monkeypatch):
    def here(make, arguments, parts, *_):
        yield from map(make(*arguments), parts)

    monkeypatch.setattr(corpus, "spread", here)
    tokenizer = open_tokenizer(vocabulary)
    (logs[0].parent / "empty.jsonl").write_text("")
    files = [*logs, logs[0].parent / "empty.jsonl"]
    one, many = (
        [document.tolist() for document in read(files, tokenizer, tokenizer.eos_token_id, lambda done: None)]
        for read in (corpus.read_here, corpus.Sharded(str(vocabulary)))
    )
    assert one == many
    assert len(one) == 2 * 25  # prompts and answers
