"""Training recipes: drafters for any model, one file a recipe over one shared loop (`loop.py`).

python -m paceline.train --help
"""
