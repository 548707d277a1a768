"""medusa: K small heads on the target's last state, each of which proposes the tokens of one depth of a fixed tree.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv 2401.10774).
Head k reads the state after the final norm of the last committed token and says what comes k + 1 tokens after the next
one, which the target has chosen already: it is the root. The candidates of a depth are the same below every node of the
depth before. Heads share the target's output head or bring their own. Folders that `paceline train medusa` wrote and
the layouts in which others publish heads are read (docs/methods/medusa.md lists them).

Acceptance is lossless. The authors' typical acceptance, which is not, is `paceline.core.typical.Typical`."""

import re
from pathlib import Path

import torch

from paceline.core.round import Round
from paceline.core.tree import IntArray
from paceline.draft.models.checkpoint import CONFIG, check_all, open_head
from paceline.draft.models.layers import load_module, nbytes, placed, table_and_head
from paceline.draft.models.networks import ResidualHeads
from paceline.draft.models.static_heads import StaticConfig, StaticHeads, count_heads
from paceline.draft.models.vocab import check_map
from paceline.errors import ModelError
from paceline.target.base import Facts, Needs
from paceline.target.linear import linear
from paceline.target.load import open_weights

SHARED, TOKENS = "lm_head.weight", "token_map"
"""vLLM's names: an output head that all heads share, and the tokens of its rows, where they are not all."""
INSIDE = "medusa_head."  # before the names of heads that lie inside the checkpoint of a whole model (Medusa-2)
FILE = "medusa_lm_head.safetensors"  # a name of the file of weights, other than model.safetensors

_NAMES = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), "{0}.{1}.linear.{2}"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), "{0}.{1}.linear.{2}"),
    (re.compile(r"(\d+)\.\d+\.(weight)"), "lm_heads.{0}.{1}"),
    (re.compile(r"lm_heads\.(\d+)\.(weight)"), "lm_heads.{0}.{1}"),
)
"""Names of the authors' files and of vLLM's, and ours for the same."""


class Medusa(StaticHeads):
    """Drafts a fixed tree with K heads that read the target's last state alone."""

    name = "medusa"
    paper = "Cai et al. 2024, Medusa, arXiv 2401.10774"
    Config = StaticConfig

    def open(self, target: Facts) -> int:
        path, dtype = self.config.checkpoint, self.config.dtype
        tensors = read_heads(path, target)
        heads, layers = check_heads(path, tensors, target)
        tokens = tensors.pop(TOKENS, None)
        own = placed({name: t for name, t in tensors.items() if name.startswith("lm_head")}, target, dtype)
        if tokens is not None:
            self.own_tokens = tokens.long().numpy()
        if SHARED in own:
            whole = tensors[SHARED].to(target.device, target.dtype)
            if tokens is not None or not torch.equal(whole, table_and_head(target)[1].dense().to(whole)):
                self.own_heads = [linear([own[SHARED]], None, target.dtype)] * heads
        elif own:
            self.own_heads = [linear([own[f"lm_heads.{k}.weight"]], None, target.dtype) for k in range(heads)]
        blocks = placed({name: t for name, t in tensors.items() if ".linear." in name}, target, dtype)
        self.network = load_module(ResidualHeads(heads, layers, target.hidden_size), blocks, target)
        self.weight_bytes = nbytes(blocks)
        self.layer = target.num_layers
        self.needs = Needs(hidden_layers=(self.layer,))
        return heads

    def guess(self, states: torch.Tensor, roots: IntArray, size: int) -> IntArray:
        depth = int(self.template.depth[size - 1])
        return self.fill_table(torch.stack([head(states) for head in list(self.network)[:depth]], 1), roots, size)

    def read_text(self, tokens: IntArray, states: torch.Tensor) -> torch.Tensor:
        return torch.stack([head(states) for head in self.network], 1)

    def observe(self, round: Round) -> None:
        """Keep the state of the last token that was committed, whoever drafted it."""
        for i, row in enumerate(round.rows):
            self.last[row.id] = round.committed(i, self.layer)[-1].clone()


def read_heads(path: str, target: Facts) -> dict[str, torch.Tensor]:
    """The tensors of the heads at `path`, by our names: `{head}.{block}.linear.*`, `lm_heads.{head}.weight` for output
    heads of their own, SHARED and TOKENS. Names that nobody knows stay as they are, for `check_heads` to refuse."""
    inside = _inside_model(path)
    found = inside if inside is not None else open_head(_file(path), Medusa.name, target)[1]
    return {_ours(name.removeprefix(INSIDE)): tensor for name, tensor in found.items()}


def _file(path: str) -> str:
    """The file of weights in a folder, where it has a name of its own."""
    own = Path(path).expanduser() / FILE
    return str(own) if own.is_file() else path


def _inside_model(path: str) -> dict[str, torch.Tensor] | None:
    """The heads inside the checkpoint of a whole model; None if it is not one."""
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file() or _file(path) != path:
        return None
    try:
        names = open_weights(folder)
    except ModelError:
        return None  # no weights at all, which the caller says better
    heads = [name for name in names if name.startswith(INSIDE)]
    return {name: names[name].get_tensor(name) for name in heads} or None


def _ours(name: str) -> str:
    for pattern, ours in _NAMES:
        if match := pattern.fullmatch(name):
            return ours.format(*match.groups())
    return name


def check_heads(path: str, tensors: dict[str, torch.Tensor], target: Facts) -> tuple[int, int]:
    """(number of heads, blocks of each), counted from the tensors, whatever config.json says: published ones are wrong.

    MethodError unless they are a whole set of heads for the target, and nothing else. Missing biases are zeros."""
    heads, layers = count_heads(path, tensors)
    h, vocab = target.hidden_size, target.vocab_size
    if not any(name.endswith("linear.bias") for name in tensors):
        tensors |= {f"{k}.{j}.linear.bias": torch.zeros(h) for k in range(heads) for j in range(layers)}
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        for j in range(layers):
            shapes |= {f"{k}.{j}.linear.weight": (h, h), f"{k}.{j}.linear.bias": (h,)}
    rows = vocab
    if TOKENS in tensors:
        check_map(tensors[TOKENS].long(), vocab)
        rows = len(tensors[TOKENS])
        shapes[TOKENS] = (rows,)
    if SHARED in tensors:
        shapes[SHARED] = (rows, h)
    elif any(name.startswith("lm_heads.") for name in tensors):
        shapes |= {f"lm_heads.{k}.weight": (rows, h) for k in range(heads)}
    check_all(path, tensors, shapes)
    return heads, layers
