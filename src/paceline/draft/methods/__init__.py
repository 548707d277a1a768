"""The methods, one in each file. `paceline.draft.registry` finds them by name."""
