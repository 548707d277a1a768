"""The loop: the engine, its schedules and its budget, and the memory of the cache and of prefixes."""
