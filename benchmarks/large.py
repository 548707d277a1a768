"""A small model made as costly as a large one without changing what it says, and its drafters with it.

    python benchmarks/large.py models/demo 1B build/demo-1b --draft models/demo-draft build/demo-draft-1b
    paceline bench build/demo-1b -d sam -d model:build/demo-draft-1b

Width is padded with zeros and norms are rescaled to match, heads and MLP columns that meet zero weights are added, and
layers that add nothing: the same function at the cost of a model of ordinary proportions. A draft model is enlarged
like any model, by as much as its target, its exits with it; a head or an adapter over the target's states is padded
state by state, and drafts what it drafted before.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline.draft.models.checkpoint import CONFIG, KIND, TargetFacts, open_drafter
from paceline.draft.models.vocab import FILE as VOCABULARY
from paceline.draft.shapes import SLOTS_FILE
from paceline.errors import ModelError, PacelineError
from paceline.jsonl import loads
from paceline.target.base import Target
from paceline.target.checks import check_shapes, unsupported
from paceline.target.folder import INDEX, SMALL_FILES, find, open_weights, read_config, shapes_of
from paceline.target.load import TOKENIZER_FILES, load, load_tokenizer
from paceline.target.shape import Shape, weight_shapes
from paceline.train.saving import save_drafter

RECORD = "enlargement.json"
"""File of an enlarged model's folder that says what was done."""

SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}

WIDTHS = (1, 4, 16)
"""Factors whose square root is a power of two, so that norm weights stay exact in any dtype."""

TOLERANCE = 0.05
"""How far the parameter count may be from what was asked for."""

MLP_RATIO, WIDTH_TO_LAYERS = (3.0, 4.0), (30.0, 130.0)
"""Ordinary proportions of language models: MLP over width, width over number of layers."""


@dataclass(frozen=True)
class Proportions:
    """The numbers of a model that an enlargement changes, and its parameters (embeddings included; a head that is
    tied to them counts once)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    parameters: int

    @classmethod
    def of(cls, shape: Shape) -> Proportions:
        """Those of a decoder."""
        return cls(
            shape.hidden_size,
            shape.num_layers,
            shape.num_heads,
            shape.num_kv_heads,
            shape.intermediate_size,
            num_parameters(shape),
        )

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters (width {self.hidden_size}, {self.num_layers} layers, "
            f"{self.num_heads}/{self.num_kv_heads} heads, MLP {self.intermediate_size})"
        )


@dataclass(frozen=True)
class Enlargement:
    """What was done to the model `source`; bytes of the weights written."""

    source: str
    small: Proportions
    large: Proportions
    bytes: int

    @property
    def width_factor(self) -> int:
        """1, 4 or 16."""
        return self.large.hidden_size // self.small.hidden_size

    @property
    def layer_factor(self) -> int:
        """Layer l of the small model is layer l times this of the large one."""
        return self.large.num_layers // self.small.num_layers

    def fits(self, shape: Shape) -> bool:
        """Whether a model has the layers that the small one has, if not as many: it was cut from one like it."""
        cut = replace(Proportions.of(shape), num_layers=0, parameters=0)
        return cut == replace(self.small, num_layers=0, parameters=0)

    def of(self, shape: Shape) -> Shape:
        """A model of such layers after the same was done to it."""
        return grown(shape, self.width_factor, self.layer_factor, self.large.intermediate_size)

    def describe(self) -> str:
        """One sentence for a record."""
        added = self.layer_factor - 1
        layers = f", and {added} {'layers that add' if added > 1 else 'layer that adds'} nothing behind each of its own"
        return (
            f"{self.source}, {self.small}, was enlarged to {self.large} without changing the function it computes: "
            "width padded with zeros and norms rescaled to match, added heads and MLP columns that meet zero weights"
            f"{layers if added else ''}."
        )

    @classmethod
    def read(cls, folder: str | Path) -> Enlargement:
        """What `enlarge` noted in the folder it wrote. ModelError if it wrote none."""
        try:
            record = loads((Path(folder) / RECORD).read_bytes())
            small, large = Proportions(**record.pop("small")), Proportions(**record.pop("large"))
            return cls(small=small, large=large, **record)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise ModelError(f"{folder} is not an enlarged model: it has no readable {RECORD}") from None


def parse_size(text: str) -> int:
    """Parameters: "1B" is 10**9; "500M", "1.5B", "300k" and plain numbers too. PacelineError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    size = round(float(match[1]) * SIZES[match[2]]) if match else 0
    if size < 1:
        raise PacelineError(f"{text!r} is not a size; give a number of parameters such as 1B, 1.5B, 500M or 250000")
    return size


def num_parameters(s: Shape) -> int:
    q, kv, h, m = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.hidden_size, s.intermediate_size
    biases = s.qkv_bias * (q + 2 * kv) + s.out_bias * h + s.mlp_bias * (2 * m + h)
    layer = 2 * h * (q + kv) + 3 * h * m + 2 * h + biases + s.qk_norm * 2 * s.head_dim
    return (1 if s.tied else 2) * s.vocab_size * h + s.num_layers * layer + h


def choose_shape(small: Shape, params: int, name: str) -> Shape:
    """The shape of about `params` parameters that is nearest to ordinary proportions."""
    now = num_parameters(small)
    near = {shape: num_parameters(shape) for shape in _near(small, params)}
    shapes = [s for s, size in near.items() if size > now and abs(size - params) <= TOLERANCE * params]
    if shapes and params > now:
        return min(shapes, key=lambda s: (_oddness(s), abs(near[s] - params)))
    smallest = min(num_parameters(s) for s in _neighbours(small))
    if params <= now:
        raise ModelError(
            f"{name} has {now:,} parameters already, so it cannot be enlarged to {params:,}; "
            f"the smallest enlargement has {smallest:,}"
        )
    sizes = sorted(sorted(set(near.values()), key=lambda size: abs(size - params))[:2])
    raise ModelError(
        f"{name} cannot be enlarged to within {TOLERANCE:.0%} of {params:,} parameters; "
        f"the nearest sizes are {' and '.join(f'{size:,}' for size in sizes)}"
    )


def _near(small: Shape, params: int) -> Iterator[Shape]:
    """For every width and number of layers (no more than the width) that leave room, the MLP that comes nearest to
    `params`; and the first that leave none."""
    for width in WIDTHS:
        for layers in range(1, 1 + max(1, small.hidden_size * width // small.num_layers)):
            least = grown(small, width, layers, small.intermediate_size)
            wider = replace(least, intermediate_size=least.intermediate_size + 1)
            slope = num_parameters(wider) - num_parameters(least)
            exact = small.intermediate_size + (params - num_parameters(least)) / slope
            columns = {64 * math.floor(exact / 64), 64 * math.ceil(exact / 64), small.intermediate_size}
            for mlp in columns:
                if mlp >= small.intermediate_size:
                    yield replace(least, intermediate_size=mlp)
            if num_parameters(least) > params:
                break


def _neighbours(small: Shape) -> list[Shape]:
    """The least that can be added in each direction."""
    mlp = small.intermediate_size
    return [grown(small, 1, 2, mlp), grown(small, WIDTHS[1], 1, mlp), grown(small, 1, 1, 64 * (mlp // 64 + 1))]


def grown(small: Shape, width: int, layers: int, mlp: int) -> Shape:
    return replace(
        small,
        hidden_size=small.hidden_size * width,
        num_heads=small.num_heads * width,
        num_kv_heads=small.num_kv_heads * width,
        num_layers=small.num_layers * layers,
        intermediate_size=mlp,
        eps=small.eps / width,
    )


def _oddness(s: Shape) -> float:
    """How far from ordinary proportions: 0 within them, squares of logarithms outside."""

    def outside(value: float, low: float, high: float) -> float:
        return max(math.log(low / value), math.log(value / high), 0.0)

    mlp = outside(s.intermediate_size / s.hidden_size, *MLP_RATIO)
    return mlp**2 + outside(s.hidden_size / s.num_layers, *WIDTH_TO_LAYERS) ** 2


SHARD_BYTES = 1 << 28

COPIED = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    VOCABULARY,
    SLOTS_FILE,
)

GROWING = ("hidden_size", "num_attention_heads", "num_key_value_heads")
"""Entries of a head's configuration that grow with the width."""
LAYERS = "eagle_aux_hidden_state_layer_ids"
TABLES = ("lm_head", "lm_heads", "embed_tokens", "position_embedding")
"""Tensors of heads with a row for every token or depth: their number stays."""


def enlarge(folder: str | Path, params: int | Enlargement, out: str | Path) -> Enlargement:
    """Write the Llama-family model in `folder` (or of that name on the hub), enlarged to about `params` parameters,
    to the new folder `out`: config.json, safetensors in the dtype of the original, tokenizer files.

    params: or what was done to a model with the same layers, to do the same to these.
    Raises ModelError for a model or a size that this cannot do, PacelineError if there is no room or `out` exists.
    Nothing is left then."""
    out = Path(out).expanduser()
    if out.exists():
        raise PacelineError(f"{out} exists already; name a new folder")
    source = Source(find(folder, [*SMALL_FILES, "*.safetensors"]))
    small = source.shape
    large = params.of(small) if isinstance(params, Enlargement) else choose_shape(small, params, source.name)
    source.width_factor = large.hidden_size // small.hidden_size
    source.layer_factor = large.num_layers // small.num_layers
    size = num_parameters(large) * source.like("model.embed_tokens.weight").element_size()
    made = Enlargement(source.name, Proportions.of(small), Proportions.of(large), size)
    with _new_folder(out, size) as new:
        _write_json(new / "config.json", _config(source, large))
        _write_json(new / RECORD, asdict(made))
        copy_files(source.folder, new)
        _write(new, source, weight_shapes(read_config(new)))
    return made


def copy_files(folder: Path, new: Path) -> None:
    """What an enlargement has unchanged from the model or drafter in `folder`."""
    for name in COPIED:
        if (folder / name).exists():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, new / name)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


class Source:
    """The small model: its shape, its tensors (mapped, not yet read), and what becomes of each.

    layer_factor, width_factor  of the enlargement; set before `like` and `enlarged` are asked.
    ModelError if the model in `folder` is not one that can be enlarged."""

    def __init__(self, folder: Path):
        config = read_config(folder)
        reason = unsupported(config)
        if getattr(config, "quantization_config", None) is not None:
            reason = "its weights are quantized"
        if reason:
            raise ModelError(f"{folder} cannot be enlarged: {reason}")
        opened, shapes = open_weights(folder), weight_shapes(config)
        check_shapes(folder, shapes, shapes_of(opened), config.num_hidden_layers)
        self.folder, self.name, self.shape = folder, folder.resolve().name, Shape.of(config)
        self.tensors = {name: opened[name].get_tensor(name) for name in shapes}
        self.spread = float(getattr(config, "initializer_range", None) or 0.02)
        self.width_factor = self.layer_factor = 1

    def like(self, name: str) -> torch.Tensor:
        """The tensor of the small model that tensor `name` of the large one comes from, or comes after."""
        return self.tensors[self._origin(name)[0]]

    def enlarged(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Tensor `name` of the large model."""
        origin, added = self._origin(name)
        return padded(name, self.tensors[origin], shape, self.width_factor, spread=self.spread, empty=added)

    def _origin(self, name: str) -> tuple[str, bool]:
        """Name in the small model, and whether the layer is an added one."""
        at = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if at is None:
            return name, False
        layer, added = divmod(int(at[1]), self.layer_factor)
        return f"model.layers.{layer}.{at[2]}", added > 0


def padded(
    name: str, old: torch.Tensor, shape: tuple[int, ...], width_factor: int, *, spread: float, empty: bool
) -> torch.Tensor:
    """Tensor `name` (by its name's end: a norm, a projection, the embeddings) of a model whose width is `width_factor`
    times as large; empty: of a layer that is to add nothing."""
    kind = name.split(".")[-2]
    if kind.endswith("norm"):
        return _rescaled(old, shape, 1.0 if kind in ("q_norm", "k_norm") else width_factor**-0.5)
    # What adds to the hidden state must add zeros where the small model has nothing to add. Everything else may be
    # anything there: it is multiplied by those zeros.
    adds = kind in ("o_proj", "down_proj", "embed_tokens")
    new = torch.zeros(shape, dtype=old.dtype) if adds else _noise(name, shape, spread).to(old.dtype)
    if not empty:
        new[tuple(slice(n) for n in old.shape)] = old
    return new


def _rescaled(weight: torch.Tensor, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """A norm's weight; where the hidden state is zero it may be anything."""
    new = torch.full(shape, scale, dtype=weight.dtype)
    new[: len(weight)] = weight * scale
    return new


def _noise(name: str, shape: tuple[int, ...], spread: float) -> torch.Tensor:
    """Random numbers that depend on the tensor's name and shape alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(0.0, spread, generator=generator)


def _config(source: Source, large: Shape) -> dict[str, Any]:
    """config.json of the large model. The size of a head is the same, whether it is given or follows from the rest:
    width and heads grow by the same factor."""
    values: dict[str, Any] = loads((source.folder / "config.json").read_bytes())
    values |= {
        "hidden_size": large.hidden_size,
        "intermediate_size": large.intermediate_size,
        "num_hidden_layers": large.num_layers,
        "num_attention_heads": large.num_heads,
        "num_key_value_heads": large.num_kv_heads,
        "rms_norm_eps": large.eps,
    }
    if values.get("layer_types"):
        values["layer_types"] = [kind for kind in values["layer_types"] for _ in range(source.layer_factor)]
    if values.get("exits"):  # of a draft that a token may leave half-way
        values["exits"] = [exit * source.layer_factor for exit in values["exits"]]
    if values.get("max_window_layers"):
        values["max_window_layers"] *= source.layer_factor
    return values


# Writing it --------------------------------------------------------------------------------------------------


@contextmanager
def _new_folder(out: Path, size: int) -> Iterator[Path]:
    """A temporary folder that becomes `out` when all went well, and is removed when not."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < 1.01 * size:
            raise PacelineError(
                f"{out.parent} has {free / 1e9:.1f} GB free, and the enlarged model takes {size / 1e9:.1f} GB"
            )
        new = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise PacelineError(f"{out} cannot be written: {error.strerror}") from error
    try:
        yield new
        new.chmod(0o755)
        new.rename(out)
    except (OSError, SafetensorError) as error:
        raise PacelineError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write(folder: Path, source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The tensors `shapes` into shards in `folder`, one shard in memory at a time."""
    sizes = {name: torch.empty(shape, dtype=source.like(name).dtype, device="meta") for name, shape in shapes.items()}
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_BYTES)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: source.enlarged(name, shapes[name]) for name in names}, folder / file, {"format": "pt"})
    if plan.is_sharded:
        _write_json(folder / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})


# Drafters ------------------------------------------------------------------------------------------------------------


def enlarge_draft(folder: str | Path, done: Enlargement, out: str | Path) -> Enlargement:
    """Write a draft model, as many times larger as the target was made; one that was cut from the target is enlarged
    layer by layer like it, so that it is the same part of it as before. Errors as `enlarge`."""
    source = Source(find(folder, [*SMALL_FILES, "*.safetensors"]))
    if done.fits(source.shape):
        return enlarge(source.folder, done, out)
    times = done.large.parameters / done.small.parameters
    return enlarge(source.folder, round(times * num_parameters(source.shape)), out)


def enlarge_head(folder: Path, target: Target, done: Enlargement, out: Path) -> None:
    """Write a head or adapter over the small target's states as one for the enlarged `target`, padded state by state.
    One that does not say how wide it is has the target's sizes. ModelError for one of another width."""
    kind = str(loads((folder / CONFIG).read_bytes())[KIND])
    config, tensors = open_drafter(folder, kind, None)
    layers = config.get("transformer_layer_config") or config
    width = layers.get("hidden_size", done.small.hidden_size)
    if width != done.small.hidden_size:
        raise ModelError(f"{folder} cannot be enlarged: it is {width} wide, its target {done.small.hidden_size}")
    sizes = Sizes(width, layers.get("intermediate_size", done.small.intermediate_size), done)
    own = {key: value for key, value in config.items() if key not in (KIND, "paceline", "target")}
    if "transformer_layer_config" in own:
        own["transformer_layer_config"] = sizes.described(layers)
    elif "hidden_size" in own:
        own = sizes.described(own)
    if own.get(LAYERS):
        own[LAYERS] = [layer * done.layer_factor for layer in own[LAYERS]]
    if "exit_layer" in own:
        own["exit_layer"] *= done.layer_factor
    large = {name: sizes.grown(name, tensor) for name, tensor in tensors.items()}
    copy_files(folder, out)
    save_drafter(out, kind, config=own, tensors=large, target=TargetFacts.of(target))


class Sizes:
    """How a head's tensors and its configuration grow. width: of a state; inner: of its MLP."""

    def __init__(self, width: int, inner: int, done: Enlargement):
        self.width, self.inner, self.factor = width, inner, done.width_factor
        self.large_inner = round(inner * done.large.intermediate_size / done.small.intermediate_size)

    def described(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the large head's layers."""
        grown = {key: layers[key] * self.factor for key in GROWING if key in layers}
        eps = layers.get("rms_norm_eps", 1e-6) / self.factor
        return {**layers, **grown, "intermediate_size": self.large_inner, "rms_norm_eps": eps}

    def grown(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """Tensor `name` of the large head."""
        if not old.is_floating_point():
            return old
        kind = name.removesuffix(".weight").removesuffix(".bias").split(".")
        if any("norm" in part for part in kind):
            if kind[-1] in ("q_norm", "k_norm"):
                return old
            # Where the state is zero it may be anything.
            return self._spread(old * self.factor**-0.5, 0, self._places(kind, 0, len(old)))
        for axis, size in enumerate(old.shape):
            old = self._spread(old, axis, self._places(kind, axis, size))
        return old

    def _places(self, kind: list[str], axis: int, size: int) -> tuple[int, int]:
        """Size of the parts of an axis that are padded each, and what they are padded to."""
        if axis == 0 and any(part in TABLES for part in kind):
            return size, size
        if (axis == 0 and kind[-1] in ("gate_proj", "up_proj")) or (axis == 1 and kind[-1] == "down_proj"):
            return size, self.large_inner
        if (axis == 0 and kind[-1] in ("q_proj", "k_proj", "v_proj")) or (axis == 1 and kind[-1] == "o_proj"):
            return size, size * self.factor
        return self.width, self.width * self.factor

    @staticmethod
    def _spread(old: torch.Tensor, axis: int, places: tuple[int, int]) -> torch.Tensor:
        """`old` with every part of an axis followed by zeros."""
        part, padded = places
        if part == padded:
            return old
        moved = old.movedim(axis, -1)
        parts = moved.unflatten(-1, (-1, part))
        return torch.nn.functional.pad(parts, (0, padded - part)).flatten(-2).movedim(-1, axis).contiguous()


def main() -> None:
    """Enlarge a model, and drafters with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("size", help="parameters: 500M, 1B, ...")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--draft", nargs=2, action="append", default=[], metavar=("FOLDER", "OUT"),
                        help="a draft model, a head or an adapter; may be repeated")  # fmt: skip
    given = parser.parse_args()
    done = enlarge(given.model, parse_size(given.size), given.out)
    print(done.describe())
    for folder, out in given.draft:
        config = loads((Path(folder) / CONFIG).read_bytes())
        if "model_type" in config and (KIND not in config or "exits" in config):
            enlarge_draft(folder, done, out)
        else:
            target = load(given.out)
            target.tokenizer = load_tokenizer(given.out)
            enlarge_head(Path(folder), target, done, Path(out))
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
