"""Files of gpt-oss, Gemma 4 and GLM 4.7 Flash in llama.cpp: what it reads of them is what we read. Set
PACELINE_XLLAMACPP_PYTHON to the interpreter of an environment with xllamacpp, then

    pytest -m slow tests/target/test_gguf_newer_slow.py
"""

from __future__ import annotations

from math import exp, log, pi
from pathlib import Path
from typing import Any

import pytest
from tests import gguf_files, models
from tests.target.test_gguf_hybrids_slow import ours, theirs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RANGE = exp(64 * log(32 / (2 * pi)) / (2 * 4.99999))
"""A base of rotary positions whose blended dimensions end next to a whole number, to which llama.cpp rounds them."""
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "num_hidden_layers": 4}
SIZES: dict[str, dict[str, Any]] = {
    "gpt-oss": WIDE | {
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": RANGE, "factor": 4.0, "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
    "gemma4": {
        "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "global_head_dim": 64,
        # llama.cpp takes the two last layers of their own for those that others read.
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    },
    "gemma4-moe": {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "global_head_dim": 64},
    "glm-flash": {
        "hidden_size": 128, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 64, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", SIZES)
def test_llama_cpp_writes_the_same_text(family: str, seed: int, tmp_path: Path) -> None:
    models.make(family, tmp_path / "model", seed=seed, **SIZES[family])
    file = gguf_files.write(tmp_path / "model", tmp_path / "model.gguf")
    assert theirs(file) == ours(file)
