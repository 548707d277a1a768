"""Tiny models for other engines to answer with."""


import pytest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Settings of its own in generation_config.json, which no peer may heed, and text that repeats itself."""
    from tests import models  # It needs torch, which not every test here does.

    folder = models.make("llama2", tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)
    _repeat_itself(folder)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.3, "top_k": 3, "repetition_penalty": 1.9, "max_length": 30, '
        '"eos_token_id": [1, 40], "num_assistant_tokens": 1}'
    )
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory, tiny):
    """The first layer of it and the head: some drafts are right, some wrong."""
    from safetensors.torch import load_file, save_file
    from tests import models

    folder = models.make("llama2", tmp_path_factory.mktemp("draft"), num_hidden_layers=1)
    weights = load_file(folder / "model.safetensors") | load_file(tiny / "model.safetensors")
    kept = {k: v for k, v in weights.items() if ".layers." not in k or ".layers.0." in k}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _repeat_itself(folder):
    """Let the next token hang mostly on the last one."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weak = {k: v * 0.1 if "o_proj" in k or "down_proj" in k else v for k, v in load_file(file).items()}
    save_file(weak, file, metadata={"format": "pt"})
