"""One file a method; `paceline.draft.registry` finds them by name."""
