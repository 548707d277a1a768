"""GGUF files and weights of fewer bits, as users of the command line meet them."""

import json

from tests.gguf_files import write


def test_a_file_is_generated_from_like_a_folder(command, tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf")
    asked = ("the cat and the dog and the cat", "--raw", "-n", "20", "--ignore-eos", "--dtype", "float32")
    ours, own = command("generate", path, *asked), command("generate", tiny, *asked)
    assert ours.code == own.code == 0
    assert ours.out == own.out
    unknown = write(tiny, tmp_path / "unknown.gguf", pre="nobody-knows")
    refusal = command("generate", unknown, *asked)
    assert refusal.code == 2
    assert "'nobody-knows', and gpt-2, llama-bpe, qwen2, qwen35, dbrx, gpt-4o, tekken, smollm are known" in refusal.err
    assert "--tokenizer PATH" in refusal.err
    assert command("generate", unknown, *asked, "--tokenizer", tiny).out == own.out


def test_a_named_dtype_expands_blocks(command, tiny, tmp_path):
    path, asked = write(tiny, tmp_path / "q.gguf", "Q8_0"), ("the cat", "--raw", "-n", "4")
    for dtype, weights in (
        ("auto", "Q8_0, 8.5 bits a weight"), ("float32", "float32, expanded from Q8_0, 8.5 bits a weight ("),
        ("bfloat16", "bfloat16, expanded from Q8_0, 8.5 bits a weight ("),
    ):
        said = command("generate", path, *asked, "--dtype", dtype)
        assert said.err.startswith(f"q has its weights in {weights}"), said.err
        record = json.loads(command("generate", path, *asked, "--dtype", dtype, "--json").out)
        assert record["weights"].startswith(weights)
    refused = command("generate", path, *asked, "--dtype", "int8-float32")
    assert (refused.code, refused.out) == (2, "")
    assert "int8 cannot be made of it" in refused.err
    other = command("generate", write(tiny, tmp_path / "other.gguf", "IQ4_NL"), *asked)
    assert "matrices held as Q8_0: " in other.err
    assert " in IQ4_NL; " in other.err
    assert command("generate", tmp_path / "other.gguf", *asked, "--dtype", "bfloat16").code == 0


def test_a_quantised_engine_is_held_to_its_own_weights(command, tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf", "Q8_0")
    few = ("-d", "sam", "--requests", 16, "-n", 8, "--budget", 0, "--json")
    said = command("certify", path, *few, "--against", "float32")
    assert json.loads(said.out)["reference"] == "these weights (Q8_0, 8.5 bits a weight), expanded to float32"
    assert said.code in (0, 3)
    refused = command("certify", path, *few, "--against", "float16")
    assert (refused.code, refused.out) == (2, "")
    assert "not one of 'float32'" in refused.err
    assert "there are 8 and 16" in command("generate", path, "the cat", "--activations", 12).err


def test_a_model_is_quantised_once(command, tiny, tmp_path):
    asked = ("the cat and the dog", "--raw", "-n", "20", "--ignore-eos")
    made = command("quantize", tiny, tmp_path / "four", "--dtype", "int4")
    assert (made.code, made.err) == (0, "")
    assert "MB of weights" in made.out
    runs = ((tmp_path / "four", ()), (tiny, ("--dtype", "int4")))
    loaded, own = (command("generate", model, *asked, *how) for model, how in runs)
    assert loaded.out == own.out
    assert "it may answer otherwise than in 16 bits, with drafts or without" in own.err
    record = json.loads(command("generate", tiny, *asked, "--dtype", "int4", "--json").out)
    assert record["new_tokens"] == 20
    assert record["weights"].startswith("Q")
    assert json.loads(command("generate", tiny, *asked, "--dtype", "float32", "--json").out)["weights"] == "float32"
    again = command("quantize", tiny, tmp_path / "four")
    assert again.code == 2
    assert again.err.startswith("error:")
    assert "exists already" in again.err
    assert command("quantize", tiny, tmp_path / "new", "--dtype", "int5").code == 2
