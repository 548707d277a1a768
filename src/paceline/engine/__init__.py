"""The loop and its nouns: requests, trees, rounds, acceptance, sampling, the scheduler, memory; and the engine."""
