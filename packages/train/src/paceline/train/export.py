"""Medusa heads for vLLM: in the layout that it reads, with the target's output head.

Our folders, and published ones, leave out the output head, which is shared with the target. vLLM does not take it from
the target, and needs its own keys in config.json. (Heads of `paceline train eagle3` need no export.)"""

import re
import sys
from pathlib import Path

from torch import Tensor

from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.heads.checkpoint import CONFIG, WEIGHTS
from paceline.formats.heads.files import open_head
from paceline.formats.shape import Shape
from paceline.outputs import replacing, write_json
from paceline.target.load import open_weights, read_config
from paceline.train.options import Out
from paceline.train.saving import save_tensors

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.\d+\.weight")


def export_medusa(heads: Path, target: Path, out: Path) -> None:
    """Write the heads in the folder `heads`, made for the model in the folder `target`, into the folder `out`.
    PacelineError if they are not Medusa's, or of another width."""
    _, tensors = open_head(heads, "medusa", None)
    blocks: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if block := _BLOCK.fullmatch(name):
            blocks["blocks.{}.layers.{}.{}".format(*block.groups())] = tensor
        elif output := _OUTPUT.fullmatch(name):
            outputs[f"lm_heads.{output[1]}.weight"] = tensor
    if not blocks or len(blocks) + len(outputs) != len(tensors):
        raise PacelineError(f"{heads} holds no Medusa heads in the authors' layout: {', '.join(sorted(tensors)[:4])}")
    shape, width = Shape.of(read_config(target)), next(iter(blocks.values())).shape[-1]
    if width != shape.hidden_size:
        raise PacelineError(f"{heads} reads states of {width} numbers, and those of {target} have {shape.hidden_size}")
    count = 1 + max(int(name.split(".")[1]) for name in blocks)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": count,
        "num_hidden_layers": 1 + max(int(name.split(".")[3]) for name in blocks),
        "medusa_fc_bias": any(name.endswith(".bias") for name in blocks),
        "original_lm_head": not outputs,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
    }
    if not outputs:
        opened = open_weights(target)
        name = "lm_head.weight" if "lm_head.weight" in opened else "model.embed_tokens.weight"
        head: Tensor = opened[name].get_tensor(name)
        outputs = {"lm_head.weight": head.to(next(iter(blocks.values())).dtype)}
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / WEIGHTS) as file:
        save_tensors(file, blocks | outputs, {"format": "pt"})
    write_json(out / CONFIG, config, indent=2)


def command(
    out: Out,
    heads: Path = option(help="Folder of the Medusa heads.", argument=True, exists=True, file_okay=False),
    target: Path = option(help="Folder of the target of the heads.", argument=True, exists=True, file_okay=False),
) -> None:
    """Write Medusa heads in the layout that vLLM reads. (Heads of `eagle3` have it already.)

    paceline export vllm build/medusa path/to/model --out build/medusa-vllm
    """
    export_medusa(heads, target, out)
    print(f"wrote {out}", file=sys.stderr)
