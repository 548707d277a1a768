"""Models of transformers, random and tiny, through the scorer's interface; names of models."""

import numpy as np
import pytest
import torch
import transformers

from paceline.errors import MethodError, ModelError
from paceline.evals.vision.options import read_model
from paceline.evals.vision.towers import Towers, small

from .sets import data

CAPTIONS = ["the cat is above the dog", "one apple"]


SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
SEEN = {**SHAPE, "image_size": 32, "patch_size": 16}
SQUARE = {"height": 32, "width": 32}


def _siglip(words):
    text = {**SHAPE, "vocab_size": words, "max_position_embeddings": 16, "projection_size": 32}
    config = transformers.SiglipConfig(text_config=text, vision_config=SEEN)
    return transformers.SiglipModel(config), transformers.SiglipImageProcessorPil(size=SQUARE)


def _blip(words):
    read = {"encoder_hidden_size": 32, "max_position_embeddings": 32, "projection_dim": 16}
    config = transformers.BlipConfig(
        text_config={**SHAPE, "vocab_size": words, **read}, vision_config={**SEEN, "projection_dim": 16},
        projection_dim=16, image_text_hidden_size=16,
    )
    return transformers.BlipForImageTextRetrieval(config), transformers.BlipImageProcessorPil(size=SQUARE)


@pytest.fixture(scope="module", params=["clip", "siglip", "blip"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    towers = small(size=32, patch=16, width=32, layers=1)
    if request.param != "clip":
        build = {"siglip": _siglip, "blip": _blip}[request.param]
        towers = Towers(*(build(len(towers.tokenizer))[0], towers.tokenizer, build(len(towers.tokenizer))[1]))
    towers.save(path)
    return path


def test_a_model_is_loaded_and_scores_as_transformers_does(folder):
    towers = Towers.load(str(folder))
    pictures = [data().picture(image) for image in data().cases[0].images]
    scores = towers.encode_images(pictures) @ towers.encode_texts(CAPTIONS).T
    assert scores.shape == (3, 2)
    assert np.abs(scores).max() <= 1.0001
    pixels = towers.processor(pictures, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        tokens = towers.tokens(CAPTIONS)
        if towers.blip:
            columns = [
                towers.model(pixel_values=pixels, use_itm_head=False, **_repeated(tokens, i))[0][:, 0] for i in range(2)
            ]
            expected = torch.stack(columns, 1)
        else:
            outputs = towers.model(pixel_values=pixels, **tokens)
            expected = outputs.image_embeds @ outputs.text_embeds.T
    assert np.abs(scores - expected.numpy()).max() < 1e-2  # pixels are rounded to bytes before they are normalised
    assert towers.describe()["activation"]


def _repeated(tokens, i):
    """Caption i for each of three pictures."""
    return {key: value[[i]].expand(3, -1) for key, value in tokens.items()}


def test_names():
    assert read_model("random,seed=3")[1].seed == 3
    name, options = read_model("http://localhost:8000/v1#a/b,ask=yesno,blind=yes")
    assert name == "endpoint"
    assert (options.checkpoint, options.model, options.ask) == ("http://localhost:8000/v1", "a/b", "yesno")
    assert options.blind
    assert options.cases == 50
    for spec, message in (
        ("orakel", "Did you mean 'oracle'"), ("oracle,seed=1", "has no option 'seed'"),
        ("transformers", "needs a checkpoint"), ("http://x/v1", "URL#NAME"),
        ("http://x/v1#a,ask=loudly", "must be choice or circular"),
    ):
        with pytest.raises(MethodError, match=message):
            read_model(spec)


def test_what_is_no_dual_encoder_is_refused(tmp_path):
    transformers.LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a llama; dual encoders known here"):
        Towers.load(str(tmp_path))
    with pytest.raises(ModelError, match="cannot be read as a model"):
        Towers.load(str(tmp_path / "nowhere"))
