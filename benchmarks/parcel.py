"""What a machine with a GPU and without a network needs for benchmarks/gpu.py, as one archive in pieces.

    python benchmarks/parcel.py build/parcel --wheels gguf rich typer --file smollm2.gguf=FILE
    cat piece.* | tar xz -C SOMEWHERE                      # there; then, in SOMEWHERE:
    python3 -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python3 benchmarks/gpu.py --smollm2 smollm2.gguf --out results

In it: the source, the benchmarks, the tests that they import, models/demo with its drafters, an eagle3 head of
SmolLM2, and two of its other drafters if zoo/smollm2.toml has made them here; wheels of the packages that are named
(for Python --python, without what they need), and other files by name. The pieces are small enough for machines that
take so many megabytes at a time; their sizes are printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
HEADS = ("draft", "eagle", "eagle3", "kangaroo", "medusa")
FOLDERS = ("src", "packages", "benchmarks", "models/demo", *(f"models/demo-{head}" for head in HEADS),
    "models/smollm2-eagle3")  # fmt: skip
MADE = ("build/smollm2/dflash", "build/smollm2/draft")
FILES = ("pyproject.toml", "hatch_build.py", "tests/__init__.py", "tests/lossless_statistics.py", "tests/paths.py")
SMALL = 9 << 20
UNWANTED = ("__pycache__", ".egg-info")


def archive(out: Path, wheels: Path, more: dict[str, Path]) -> None:
    """Write the archive; small things first, so that the first piece alone can run what needs no large file."""
    own = {name: REPOSITORY / name for name in (*FILES, *FOLDERS)}
    for name in MADE:
        if (REPOSITORY / name).exists():
            own[name] = REPOSITORY / name
        else:
            print(f"without {name}, which zoo/smollm2.toml makes")
    everything = {"wheels": wheels, **own, **more}
    with tarfile.open(out, "w:gz", compresslevel=3) as tar:
        for name in sorted(everything, key=lambda name: (size(everything[name]) > SMALL, name not in own)):
            tar.add(everything[name], name, filter=wanted)


def size(path: Path) -> int:
    """Bytes of a file, or of a folder's."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")))


def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The entry without its owner; None for what is made anew there."""
    if any(part in entry.name for part in UNWANTED):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def main() -> None:
    """Make the parcel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the pieces")
    parser.add_argument("--wheels", nargs="*", default=["gguf", "rich"], help="packages that are missing there")
    parser.add_argument("--python", default="3.12", help="the version there (default 3.12)")
    parser.add_argument("--file", action="append", default=[], metavar="NAME=FILE", help="another file, and its name")
    parser.add_argument("--piece", type=int, default=56, help="most megabytes of a piece (default 56)")
    asked = parser.parse_args()
    more = {name: Path(file) for name, _, file in (text.partition("=") for text in asked.file)}
    if missing := [str(file) for file in more.values() if not file.is_file()]:
        sys.exit(f"error: there is no {', '.join(missing)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    for old in asked.out.glob("piece.*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        wheels, whole = Path(folder) / "wheels", Path(folder) / "parcel.tar.gz"
        wheels.mkdir()
        words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", asked.python]
        words += ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64", "-d", str(wheels)]
        if asked.wheels:
            subprocess.run([sys.executable, "-m", "pip", *words, *asked.wheels], check=True)
        archive(whole, wheels, more)
        data = whole.read_bytes()
    for at in range(0, len(data), asked.piece << 20):
        piece = asked.out / f"piece.{at // (asked.piece << 20)}"
        piece.write_bytes(data[at : at + (asked.piece << 20)])
        print(f"{piece}: {piece.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
