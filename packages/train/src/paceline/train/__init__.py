"""Training recipes: drafters for any model, one file a recipe over one shared loop (`loop.py`).

The command of a recipe is a function of dataclasses of options; `cli/train.toml` names it."""
