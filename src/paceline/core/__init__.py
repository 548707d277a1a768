"""What engine, drafters and target share: trees, segments, requests, sampling, acceptance, rounds."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
