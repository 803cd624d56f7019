"""A folder with the playground: `python -m milestone_llm.lab.playground.browser.pack FOLDER`

Any web server can serve it, at any path: `Playground` runs in the reader's browser, in Python for
WebAssembly (Pyodide). npm downloads Pyodide and pip its libraries, in the versions of
constraints-browser.txt; they are kept in runs/browser. Everything is compiled beforehand, which
saves two thirds of the seconds until Python has started.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from milestone_llm import MILESTONES
from milestone_llm.cli import Formatter, ended_in_one_line
from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.playground.service import Playground, presets

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
CONSTRAINTS = ROOT / "constraints-browser.txt"
PLATFORM = ["--platform", "pyemscripten_2026_0_wasm32", "--platform", "any"]
PYTHON = ["--python-version", "314", "--implementation", "cp", "--abi", "cp314", "--abi", "none"]
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm")
EDITOR = HERE / "editor.js"
POLICY = {"trusted-types": "python", "worker-src": "'self'", "script-src": "'self'"}


def has_npm() -> bool:
    """Return whether a playground can be packed on this machine."""
    return shutil.which("npm") is not None and shutil.which("node") is not None


def pack(folder: Path) -> None:
    """Write the folder anew.

    Raises:
        InputError: the folder has other content, or this is no checkout, or see `fetched_runtime`.
    """
    if not (ROOT / "exercises").is_dir():
        raise InputError(
            "the playground for a browser is packed in a checkout: an installed package has no "
            "exercises/. `milestone-llm play` needs none"
        )
    if folder.exists() and not (folder / "answers.json").exists():
        raise InputError(f"{folder} is there, and is no playground: choose another folder")
    kept = fetched_runtime()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept / "site", folder)
    answers = _recorded_answers()
    _write_engine(kept, folder / "engine.zip")
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    for name in ("worker.js", "python.mjs"):
        shutil.copy(HERE / name, folder)
    ask = asking() + (HERE / "ask.js").read_text(encoding="utf-8")
    page = Playground().html(ask=ask, policy=POLICY)
    (folder / "index.html").write_text(page, encoding="utf-8")


def asking() -> str:
    """Return the script with `askPython`, for pages of this folder and for others."""
    return (HERE / "asking.js").read_text(encoding="utf-8")


def fetched_runtime() -> Path:
    """Return a folder with npm's and pip's packages; its folder `site` has the compiled files.

    Raises:
        InputError: npm is not installed, or npm or pip fails.
    """
    if not has_npm():
        raise InputError("the playground for a browser wants npm and Node: https://nodejs.org")
    text = CONSTRAINTS.read_text(encoding="utf-8")
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    made_of = [CONSTRAINTS, HERE / "compile.mjs", EDITOR]
    name = hashlib.sha256(b"".join(each.read_bytes() for each in made_of)).hexdigest()[:12]
    kept = ROOT / "runs" / "browser" / name
    if (kept / "site").exists():
        return kept
    libraries = [pin for pin in pins if "==" in pin]
    npm = ["npm", "install", "--silent", "--no-save", "--ignore-scripts", "--prefix", str(kept)]
    _run([*npm, *(pin for pin in pins if pin not in libraries)])
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *PLATFORM, *PYTHON]
    _run([*pip, "--only-binary", ":all:", "--dest", str(kept / "wheels"), *libraries])
    came = kept / "node_modules" / "pyodide"
    with tempfile.TemporaryDirectory() as temporary:
        unpacked, library = Path(temporary, "libraries"), Path(temporary, "library")
        for wheel in (kept / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(unpacked)
        for unused in (*unpacked.rglob("*.pyi"), *unpacked.glob("pydantic/v1/**/*.py")):
            unused.unlink()
        with zipfile.ZipFile(came / "python_stdlib.zip") as file:
            file.extractall(library)
        _compile(kept, (unpacked, "/libraries", False), (library, "/lib/python314.zip", False))
        made = Path(temporary, "site")
        (made / "pyodide").mkdir(parents=True)
        _zip(unpacked, made / "libraries.zip")
        _zip(library, made / "pyodide" / "python_stdlib.zip")
        lock = json.loads((came / "pyodide-lock.json").read_text(encoding="utf-8"))
        (made / "pyodide/pyodide-lock.json").write_text(json.dumps(lock | {"packages": {}}))
        for file_name in RUNTIME:
            shutil.copy(came / file_name, made / "pyodide")
        bundle = [str(kept / "node_modules/.bin/esbuild"), "--bundle", "--minify", "--format=esm"]
        shutil.copy(EDITOR, kept)  # it finds the packages there
        _run([*bundle, str(kept / EDITOR.name), f"--outfile={made / EDITOR.name}"])
        shutil.copytree(made, kept / "site")
    return kept


def _recorded_answers() -> list[str]:
    """Return the playground's answer to each preset."""
    from .files import Files

    answer = Files(str(ROOT)).answer
    answer("/files", "null")
    answer("/trace", json.dumps(presets()[0]))  # so that all modules that it needs are imported
    return [answer("/run", json.dumps(preset))[1] for preset in presets()]


def _write_engine(kept: Path, file: Path) -> None:
    """Pack the project's modules that answering has imported, with their sources."""
    from exercises.build.check import Course

    from .files import COURSES, SCHEDULERS

    packages = {"milestone_llm", "exercises", *MILESTONES}
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    files = [getattr(sys.modules[name], "__file__", None) for name in names]
    courses = [file.source for name in COURSES for file in Course.named(name).files]
    parts = [ROOT / name for name in [*SCHEDULERS, *courses]]
    with tempfile.TemporaryDirectory() as temporary:
        for source in {*map(Path, filter(None, files)), *parts}:
            target = Path(temporary) / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        _compile(kept, (Path(temporary), "/engine", True))
        _zip(Path(temporary), file)


def _compile(kept: Path, *folders: tuple[Path, str, bool]) -> None:
    """Compile folders, given as (folder, path in the browser, whether sources stay in it)."""
    jobs = [
        {"root": str(root), "place": place, "has_sources": has_sources}
        for root, place, has_sources in folders
    ]
    pyodide = kept / "node_modules" / "pyodide" / "pyodide.mjs"
    _run(["node", str(HERE / "compile.mjs"), str(pyodide), json.dumps(jobs)])


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        told = (ended.stderr.strip() or ended.stdout.strip())[-2000:]
        raise InputError(f"{' '.join(command[:3])} failed:\n{told}")


def _zip(folder: Path, file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                packed.write(path, path.relative_to(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    name = "python -m milestone_llm.lab.playground.browser.pack"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=Formatter)
    parser.add_argument("folder", type=Path, help="it is written anew")
    folder = parser.parse_args(arguments).folder
    status = ended_in_one_line(lambda: pack(folder))
    if status == 0:
        console.print(f"The playground is in {folder}: python -m http.server -d {folder}")
    return status


if __name__ == "__main__":
    sys.exit(main())
