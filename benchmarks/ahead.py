"""How long a request waits for a server that reads ahead: from its submission until the engine has it.

    python benchmarks/ahead.py MODEL [TRIALS]"""

import asyncio
import random
import sys
from time import perf_counter

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.serve.worker import Worker, in_passing

TOKENS = 7000
"""Tokens of a conversation that is read ahead."""
ASKED = SamplingParams(max_tokens=1)


async def waits(model: str, trials: int) -> list[float]:
    """Seconds that each of `trials` requests waited, ascending."""
    engine = in_passing(lambda: Engine(model, "suffix"))
    own, taken = engine.add, list[float]()

    def add(prompt, params=ASKED):
        if params.max_tokens == 1:
            taken.append(perf_counter())
        return own(prompt, params)

    engine.add = add  # type: ignore[method-assign]
    worker, loop, rng, found = Worker(engine), asyncio.get_running_loop(), random.Random(0), list[float]()

    async def ask() -> float:
        began = perf_counter()
        async for _ in worker.submit([5, 6, rng.randrange(1000)], ASKED, loop):
            pass
        return taken[-1] - began

    for _ in range(trials):
        worker.ahead.put([rng.randrange(10, engine.target.vocab_size // 2) for _ in range(TOKENS)], SamplingParams())
        await ask()  # It wakes the worker, which reads ahead from then on.
        await asyncio.sleep(0.5 + rng.random() / 2)
        found.append(await ask())
    worker.stop()
    return sorted(found)


if __name__ == "__main__":
    model, trials = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
    found = asyncio.run(waits(model, trials))
    print(f"{model}: {trials} requests waited {1e3 * found[trials // 2]:.1f} ms, at most {1e3 * found[-1]:.1f}")
