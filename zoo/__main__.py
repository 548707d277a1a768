"""Command line of the demo family. Sources are files of yours, given as NAME=PATH or PATH.

python -m zoo --help
"""

from functools import partial

from paceline.train import __main__ as recipes
from paceline.workbench.options import app_of

app = app_of(no_args_is_help=True, help="Make the demo family in `models/` from text: all of it (family), or one stage.")
_later = partial(recipes.later, app=app)

_later("sources", "zoo.commands:sources", "Show what each source holds, and one document of it.")
_later("synth", "zoo.commands:synth", "Print generated examples: translation, sums, reading, retrieval, copying.")
_later("tokenizer", "zoo.commands:tokenizer", "Learn a byte-level BPE vocabulary, with the chat template.")
_later("pretrain", "zoo.commands:pretrain", "Train the demo model from random weights on packed text.")
_later("chat", "zoo.commands:chat", "Tune a pretrained model on conversations.")
_later("settle", "zoo.commands:settle", "Unlearn loops: make the model's own repeats unlikely.")
_later("distil", "zoo.commands:distil", "Train a small draft model on the text that the target learnt from.")
_later("family", "zoo.commands:family", "Train the whole family; an interrupted stage goes on.")
_later("held-out", "zoo.commands:held_out", "Write prompts from the held-out part of the sources.")
_later("evaluate", "zoo.commands:evaluate", "Loss on held-out text against a 5-gram model, and agreement of the draft.")
_later("drafters", "zoo.commands:drafters", "Make every drafter for a real model, on the same answers of it.")
_later("prompts", "zoo.commands:prompts", "Write prompts for a real model, without any of an evaluation.")
_later("overlap", "zoo.commands:overlap", "Check that no prompt shares text with an evaluation.")
_later("card", "zoo.commands:card", "Write the model card.")

if __name__ == "__main__":
    recipes.main(app)
