"""The loop: the engine, its schedules, the memory of the cache and of prefixes."""
