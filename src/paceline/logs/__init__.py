"""Recorded conversations: a reader for eleven forms of logs, and the tokens that a model would have read."""
