"""Recorded generations, replayed: what a drafter would have had accepted, without the model that wrote them.

    recording = read_trace("log.jsonl")            record.py     files to text
    Transcriber(tokenizer).conversation(...)       tokens.py     text to tokens, through a chat template
    replay(drafter, turn, id, tally)               walk.py       one answer against one drafter
    start(conversations, specs, ...), Report       run.py        all of them, on all cores
    predict(tally, cost)                           predict.py    acceptance to speed-up
    page(...)                                      page.py       the report as one HTML file
"""
