"""Recorded generations, replayed: what a drafter would have had accepted, without the model that wrote them.

    recording = read_trace("log.jsonl")            workbench/conversations.py: files to text
    Transcriber(tokenizer).conversation(...)       tokens.py     text to tokens, through a chat template
    replay(drafter, turn, id, tally)               walk.py       one answer against one drafter
    start(conversations, specs, ...), Report       workers.py    all of them, on all cores
    ShardedReplay(files, specs, ...)               shards.py     on several machines
    predict(tally, cost)                           predict.py    acceptance to speed-up
    page(...)                                      page.py       the report as one HTML file
"""
