"""What drafters with a model of their own share: the drafting loop, stop rules, trimmed vocabularies, checkpoints."""
