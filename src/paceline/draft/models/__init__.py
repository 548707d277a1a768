"""Parts of drafters with a model: the drafting loop, stop rules, trimmed vocabularies, checkpoints."""
