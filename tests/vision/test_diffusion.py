"""The paper's four steps through the real pipelines of diffusers, with random weights a few kilobytes large."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision import diffusion
from paceline.evals.vision.engine import compose, render
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.towers import word_tokenizer

diffusers = pytest.importorskip("diffusers", exc_type=ImportError)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A text-to-image model of 16 x 16 latents."""
    path = tmp_path_factory.mktemp("diffusion")
    torch.manual_seed(0)
    words = word_tokenizer(["white background indoor scene focus whole centred single plain out"])
    text = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(words),
        max_position_embeddings=32, eos_token_id=words.eos_token_id, bos_token_id=words.bos_token_id, pad_token_id=0,
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    parts = {"unet": unet, "vae": vae, "text_encoder": transformers.CLIPTextModel(text), "tokenizer": words}
    pipeline = diffusers.StableDiffusionPipeline(
        **parts, scheduler=diffusers.DDIMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(path)
    return str(path)


def test_objects_and_backgrounds_of_a_model(model, tmp_path):
    spec = f"{model},steps=2,size=32,cache={tmp_path}"
    plan = BuildOptions(seed=1, size=64, objects=f"diffusion:{spec}", backgrounds=f"inpaint:{spec}")
    case = compose(plan, "relative_spatial", 0)
    pictures = render(plan, case)
    assert len(pictures) == 4
    assert all(picture.size == (64, 64) for picture in pictures)
    assert len(list(tmp_path.glob("*.png"))) == 2  # each object is generated once, and kept
    assert case.facts(plan)["licences"] == [f"that of {model}"]
    again = render(plan, compose(plan, "relative_spatial", 0))
    assert [p.tobytes() for p in again] == [p.tobytes() for p in pictures]
    assert pictures[0].tobytes() != pictures[1].tobytes()


def test_inpainting_keeps_what_is_not_a_hole(model, tmp_path):
    painter = diffusion.Painter(diffusion.DiffusionOptions(model, steps=2, size=32, cache=str(tmp_path)))
    canvas = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    hole = Image.new("L", (64, 64))
    hole.paste(255, (10, 10, 40, 40))
    filled = np.asarray(painter.fill(canvas, hole, 3))
    changed = (filled != np.asarray(canvas)).any(2)
    assert changed[10:40, 10:40].mean() > 0.9
    changed[10:40, 10:40] = False
    assert not changed.any()


def test_no_model_is_one_line(tmp_path):
    with pytest.raises(PacelineError, match="is no text-to-image model"):
        diffusion.Painter(diffusion.DiffusionOptions(str(tmp_path)))
