"""Recorded conversations: eleven forms of logs, one reader, and what a model would have read of them."""
