"""Experts whose matrices are stacked in one tensor, as gpt-oss's are, in 16 bits or in blocks of four."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import models
from tests.native import TEXT, logits, off
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ModelError
from paceline.kernels.linear import BlockLinear
from paceline.target.attention import Mixture
from paceline.target.decoder import Decoder
from paceline.target.load import load


def in_blocks(folder: Path) -> Path:
    """Make `folder` a model with experts in random blocks, and `dense` beside it what transformers expands them to."""
    weights, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    expanded = {**weights}
    for name in [name for name in weights if name.endswith((".gate_up_proj", ".down_proj"))]:
        count, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8, generator=random)
        expanded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    dense = folder.with_name("dense")
    folder.rename(dense)
    save_file(expanded, dense / "model.safetensors", {"format": "pt"})
    folder.mkdir()
    config = json.loads((dense / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return dense


def test_experts_in_blocks_are_multiplied_as_they_are(tmp_path: Path) -> None:
    """And expanded, they are what transformers reads."""
    folder = models.make("gpt-oss", tmp_path / "model", hidden_size=64, intermediate_size=96)
    dense = in_blocks(folder)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(dense)
        right = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    torch.testing.assert_close(logits(load(folder, dtype="float32")), right, atol=2e-4, rtol=1e-4)
    made = load(folder, dtype="auto-float32")
    assert isinstance(made, Decoder)
    experts = made.layers[0].mlp
    assert isinstance(experts, Mixture)
    assert all(isinstance(product, BlockLinear) for one in experts.experts for product in one.products)
    assert "MXFP4" in str(made.quantised)
    assert "Q8_0" not in "\n".join(made.notes)
    assert off(logits(made), right) < 0.02
    assert made.weight_bytes < load(folder, dtype="float32").weight_bytes
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    answers = [Engine(made, draft, exact=True).generate([TEXT], params)[0].tokens for draft in ("none", "sam")]
    assert answers[0] == answers[1]
    assert "Q8_0" in str(load(folder, dtype="int8").quantised)
    with pytest.raises(ModelError, match="so int4 cannot be made of it"):
        load(folder, dtype="int4")


def test_stacks_without_their_scales_are_refused(tmp_path: Path) -> None:
    folder = models.make("gpt-oss", tmp_path / "model")
    in_blocks(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model.layers.1.mlp.experts.0.down_proj.weight, .* and 6 more"):
        load(folder)
