"""Requests for drafts as the engine makes them: as deep as the rows have room for."""

from paceline.draft.base import Ask


def asked(*rows):
    return [Ask(row, row.max_draft) for row in rows]
