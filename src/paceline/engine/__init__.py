"""The loop: the engine, its schedules and its budget, and the memory of the cache and of prefixes."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
