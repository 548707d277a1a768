"""Training recipes: drafters for any model, one file a recipe over one shared loop (`loop.py`); `zoo/` makes the demo
family.

python -m paceline.train --help
"""
