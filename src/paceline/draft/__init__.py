"""Drafters: `methods/` has one file a method; `paceline.draft.registry` turns "sam+prompt-lookup" into drafters."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
