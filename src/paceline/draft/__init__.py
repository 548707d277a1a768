"""Drafters: `methods/` has one file a method; `paceline.draft.registry` turns "sam+prompt-lookup" into drafters."""
