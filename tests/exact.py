"""What exactness must withstand: the same tokens verified alone, in drafts of any shape, in batches, in pieces."""

import numpy as np
import torch

from paceline.core.segment import Segment


def one_by_one(target, text):
    """Logits after every token of `text`, [tokens, V], each token verified alone: plain decoding."""
    slot = target.add_row(len(text))
    rows = []
    for token in text:
        rows.append(target.verify([tree(slot, [token], [-1])]).logits)
        target.commit(slot, [0])
    target.drop_row(slot)
    return torch.cat(rows)


def in_pieces(target, text, sizes):
    """The same, as chains of these sizes."""
    slot, rows, begin = target.add_row(len(text)), [], 0
    for size in sizes:
        rows.append(target.verify([tree(slot, text[begin : begin + size], range(-1, size - 1))]).logits)
        target.commit(slot, range(size))
        begin += size
    target.drop_row(slot)
    return torch.cat(rows)


def prepared(target, texts):
    """A slot for each text, which it holds."""
    slots = [target.add_row(len(text)) for text in texts]
    for slot, text in zip(slots, texts, strict=True):
        target.verify([Segment.chunk(slot, np.array(text), last=False)])
        target.commit(slot, range(len(text)))
    return slots


def hidden_in_tree(rng, path, others, vocab):
    """(tokens, parents, nodes of the path) of a random tree that has `path` as one of its branches, with other nodes
    between those of the path."""
    where = np.sort(rng.choice(np.arange(1, len(path) + others), len(path) - 1, replace=False)).tolist()
    tokens, parents, nodes = [path[0]], [-1], [0]
    for i in range(1, len(path) + others):
        if i in where:
            parents.append(nodes[-1])
            nodes.append(i)
            tokens.append(path[len(nodes) - 1])
        else:
            parents.append(int(rng.integers(i)))
            tokens.append(int(rng.integers(vocab)))
    return tokens, parents, nodes


def tree(slot, tokens, parents):
    """A segment whose nodes are all asked for."""
    array = np.array(tokens, np.int64)
    return Segment(slot, array, np.array(parents, np.int64), num_logits=len(array))
