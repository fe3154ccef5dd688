"""Build the sdist, from it the wheel, and run the wheel in an environment that has never seen this source tree."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The editable install must be out of reach, or the wheel could borrow from it.
PROBE = """
import importlib, pkgutil, sys, torch, tilewise
home = tilewise.__file__
assert home.startswith(sys.prefix), home
q = torch.randn(1, 7, 2, 8)
assert tilewise.attention(q, q, q, causal=True).shape == q.shape
names = [module.name for module in pkgutil.walk_packages(tilewise.__path__, "tilewise.")]
late = {"triton", "transformers", "typer", "rich", "matplotlib"}
for name in names:
    if name.endswith("__main__"):
        continue
    try:
        assert importlib.import_module(name).__file__.startswith(sys.prefix), name
    except ImportError as error:
        assert (error.name or "").partition(".")[0] in late, (name, error)
print(f"the wheel runs from {home}, {len(names)} modules")
"""
# What a user may ask for in brackets; texts that say `tilewise[...]` are held against it.
EXTRAS = {"bench", "cli", "demo", "dev", "docs", "hf", "triton"}


def run(folder: Path, *command: str | Path) -> None:
    """Run `command` in `folder`, from where nothing of this source tree can be imported."""
    subprocess.run([str(part) for part in command], check=True, cwd=folder)


def build(folder: Path) -> Path:
    """Build both archives into `folder` and return the wheel, which is built from the sdist."""
    run(folder, sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """The wheel is pure, and it holds every file of the package, the licence and nothing else."""
    if not wheel.name.endswith("-py3-none-any.whl"):
        sys.exit(f"{wheel.name} is not a pure wheel")
    listing = subprocess.run(
        ["git", "ls-files", "src/tilewise"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    expected = {path.removeprefix("src/") for path in listing if (ROOT / path).exists()}
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    if missing := expected - packed:
        sys.exit(f"the wheel lacks {sorted(missing)}")
    if foreign := {name for name in packed if not name.startswith("tilewise/")}:
        sys.exit(f"the wheel holds {sorted(foreign)}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        sys.exit("the wheel lacks its licence")


def check_metadata(wheel: Path) -> None:
    """Version, licence and extras are declared, and every extra that a text of the project names is one of them."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = message_from_bytes(archive.read(name))
    if found := EXTRAS ^ set(said.get_all("Provides-Extra", [])):
        sys.exit(f"extras that are declared or expected, not both: {sorted(found)}")
    versions = re.findall(r'__version__ = "(.+)"', (ROOT / "src" / "tilewise" / "__init__.py").read_text())
    if versions != [said["Version"]]:
        sys.exit(f"version {said['Version']} is declared, and tilewise.__version__ is {versions}")
    if said["License-Expression"] != "Apache-2.0":
        sys.exit(f"the licence is declared as {said['License-Expression']}")
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r"tilewise\[(\w+)\]'", text.read_text())}
    if unknown := named - EXTRAS:
        sys.exit(f"texts name extras that there are not: {sorted(unknown)}")


def install(wheel: Path, home: Path) -> Path:
    """A new environment with the wheel in it; PyTorch is borrowed from this one, for it is large."""
    home.mkdir()
    run(home, sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    run(home, sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    paths = {"base": str(home), "platbase": str(home)}
    # A .pth file adds this environment's folder without the .pth files in it: the editable install stays hidden.
    (Path(sysconfig.get_path("purelib", vars=paths)) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        check_contents(wheel)
        check_metadata(wheel)
        python = install(wheel, folder / "venv")
        run(folder, python, "-W", "error", "-c", PROBE)
        run(folder, python.parent / "tilewise", "info")
        run(folder, python.parent / "tilewise", "report")  # from files that are no Python


if __name__ == "__main__":
    main()
