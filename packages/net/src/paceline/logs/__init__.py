"""Recorded conversations: a reader for eleven forms of logs, and the tokens that a model would have read."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
