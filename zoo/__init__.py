"""How the demo family in `models/` is made: from the tokenizer and pretraining to evaluation and the model card."""
