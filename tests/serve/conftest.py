"""The tiny model that servers of these tests have."""


import pytest

from tests import models, native


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """An untrained model with 1,024 tokens of context; nothing may be written into its folder."""
    return models.make("qwen3", tmp_path_factory.mktemp("m") / "tiny", max_position_embeddings=1024, **native.TINY)
