"""JSON Lines: one reader and one writer for prompts, recordings, corpora, training data and results.

    for where, record in objects("log.jsonl", TraceError, '{"prompt": ..., "response": ...}'):
        ...
    with Appender.create(Path("new.jsonl")) as lines:
        lines.append([{"text": "one"}])

`reading.py` turns whatever a file may hold into values or into one line that says where it is broken; `writing.py`
leaves whole lines and nothing else; `pieces.py` cuts files for several readers. Knows nothing of what the records mean.
"""

from paceline.records.pieces import Piece, pieces_of
from paceline.records.reading import NotJSON, as_object, loads, numbered, objects, opened
from paceline.records.writing import (
    Appender,
    check_file,
    check_folder,
    check_log,
    check_new_folder,
    replacing,
    write_whole,
)

__all__ = [
    "Appender",
    "NotJSON",
    "Piece",
    "as_object",
    "check_file",
    "check_folder",
    "check_log",
    "check_new_folder",
    "loads",
    "numbered",
    "objects",
    "opened",
    "pieces_of",
    "replacing",
    "write_whole",
]
