"""The agent loop in verl's own workers: two Ray actors, one store, a tiny model for a server."""

from pathlib import Path

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.rollout.store import RolloutStore
from tests import models
from tests.paths import REPOSITORY
from tests.rollout.verl_client import TinyClient

pytest.importorskip("verl", reason="the package verl is not installed (it pins an older transformers)")
ray = pytest.importorskip("ray", reason="the package ray is not installed")

pytestmark = pytest.mark.slow

N, PROMPT, RESPONSE = 4, 24, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.make("llama2", tmp_path_factory.mktemp("model"), pad_token_id=2)


def config_of(folder, store, rule, **rollout):
    """verl's own configuration of its PPO trainer, with the agent loop."""
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    loops = store.with_suffix(".yaml")
    loop = {"name": "rollout_reuse", "_target_": "paceline.rollout.verl.RolloutReuseLoop", "store": str(store)}
    OmegaConf.save(OmegaConf.create([loop | {"rule": rule, "top": models.VOCAB_SIZE}]), loops)
    at = "actor_rollout_ref.rollout"
    settings = {"n": N, "prompt_length": PROMPT, "response_length": RESPONSE, "name": "vllm"} | rollout
    with initialize_config_dir(str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={folder}", f"{at}.agent.agent_loop_config_path={loops}",
                f"{at}.agent.default_agent_loop=rollout_reuse", f"{at}.agent.num_workers=2",
                *(f"{at}.{name}={value}" for name, value in settings.items()),
            ],
        )


def batch():
    """Three prompts, N rows of each, numbered as verl does."""
    from verl.protocol import DataProto

    texts = ["the cat", "the dog sat", "hello"]
    prompts = np.empty(len(texts) * N, dtype=object)
    prompts[:] = [[{"role": "user", "content": text}] for text in texts for _ in range(N)]
    made = DataProto.from_dict(non_tensors={"raw_prompt": prompts, "priority": np.arange(len(prompts))})
    made.meta_info = {"global_steps": 1, "validate": False}
    return made


def answers(output):
    pairs = zip(output.batch["responses"].tolist(), output.batch["response_mask"].tolist(), strict=True)
    return [row[: sum(mask)] for row, mask in pairs]


@pytest.fixture(scope="module")
def cluster():
    environment = {"env_vars": {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    yield
    ray.shutdown()


def epoch(config, client):
    """One batch, its halves in two actors; a group straddles them."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    workers = [ray.remote(AgentLoopWorker).options(num_cpus=1).remote(config, client) for _ in range(2)]
    halves = batch().chunk(2)
    outputs = ray.get([w.generate_sequences.remote(half) for w, half in zip(workers, halves, strict=True)])
    for worker in workers:
        ray.kill(worker)
    return outputs


@pytest.mark.parametrize("rule", ["residual", "one-hot", "plain"])
def test_two_workers_share_a_store_and_reuse_from_the_second_epoch(cluster, folder, tmp_path, rule):
    store = tmp_path / "answers"
    config = config_of(folder, store, rule, calculate_log_probs=True)
    max_len = PROMPT + RESPONSE + 1
    first = epoch(config, TinyClient(str(folder), max_len))
    reused = [count for output in first for count in output.non_tensor_batch["reused_tokens"]]
    assert (reused, len(RolloutStore(store))) == ([0] * 3 * N, 3 * N)
    second = epoch(config, TinyClient(str(folder), max_len))
    again = [count for output in second for count in output.non_tensor_batch["reused_tokens"]]
    old, new = ([row for output in of for row in answers(output)] for of in (first, second))
    for before, after, count in zip(old, new, again, strict=True):
        assert after[:count] == before[:count]
    if rule != "one-hot":
        assert old == new, "the policy is the same, and all of its tokens are listed: everything stands"
    moved = epoch(config, TinyClient(str(folder), max_len, scale=0.98))
    counts = [count for output in moved for count in output.non_tensor_batch["reused_tokens"]]
    assert sum(counts) > 0
    for output in moved:
        assert output.batch["rollout_log_probs"].isfinite().all()
    assert len(RolloutStore(store)) == 3 * N


def test_another_temperature_is_refused(cluster, folder, tmp_path):
    config = config_of(folder, tmp_path / "answers", "residual", temperature=0.7)
    with pytest.raises(Exception, match="set temperature=1") as error:
        epoch(config, TinyClient(str(folder), PROMPT + RESPONSE + 1))
    assert isinstance(error.value.cause, PacelineError) or "PacelineError" in str(error.value)
