"""Evaluations of models' answers, for `paceline eval`. They need the extras eval and vision."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
