"""The methods, one in each file. `paceline.draft.registry` finds them by name."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
