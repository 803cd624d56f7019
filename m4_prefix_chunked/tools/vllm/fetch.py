"""Get the Python files of vLLM's wheels: `python -m m4_prefix_chunked.tools.vllm.fetch 0.33.0`

vLLM's scheduler is Python. It runs without a GPU and without vLLM's compiled parts, over the torch
that is here. So pip downloads the wheel (some 340 MB), its `.py` files are kept (57 MB), and the
small packages that vLLM imports are installed next to it. The environment stays as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from milestone_llm.cli import Formatter, ended_in_one_line
from milestone_llm.core.errors import InputError

HERE = Path("runs/vllm")
PACKAGES = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi", "attrs", "cachetools", "cbor2"),
    *("cloudpickle", "einops", "frozenlist", "msgspec", "multidict", "openai-harmony"),
    *("partial-json-parser", "pillow", "prometheus-client", "propcache", "psutil", "py-cpuinfo"),
    *("pybase64", "pyzmq", "regex", "tiktoken", "uvloop", "xgrammar", "yarl"),
)
"""What vLLM's scheduler imports, beside what this project asks for."""


QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1"}


def fetch(version: str, folder: Path) -> Path:
    """Download a wheel of vLLM, and keep its Python files. Returns their folder.

    Args:
        version: 0.33.0, for example; `newest`: what pip takes.

    Raises:
        InputError: pip failed; its own words are on stderr.
    """
    wanted = "vllm" if version == "newest" else f"vllm=={version}"
    with tempfile.TemporaryDirectory() as downloads:
        wheel_of = ["--no-deps", "--only-binary=:all:", "--platform", "manylinux_2_28_x86_64"]
        _pip("download", *wheel_of, "-d", downloads, wanted)
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        target = folder / wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py") or ".dist-info/" in name:
                    archive.extract(name, target)
    packages = folder / "packages"
    if not packages.exists():
        _pip("install", "--no-deps", "--target", str(packages), *PACKAGES)
    return target


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    if subprocess.run(command, check=False).returncode:
        raise InputError(f"`pip {' '.join(words[:2])} ...` failed")


def make_importable(folder: Path | None = None) -> None:
    """Let `import vllm` find vLLM: the one that is installed, or fetched files.

    Args:
        folder: the folder with `vllm/` in it; None: the newest that was fetched.

    Raises:
        InputError: there is none.
    """
    os.environ.update(QUIET)
    if folder is None and importlib.util.find_spec("vllm"):
        return
    fetched = [path.parent for path in HERE.glob("*/vllm")]
    folder = folder or max(fetched, key=lambda path: _numbers(path.name), default=None)
    if folder is None or not (folder / "vllm").is_dir():
        raise InputError(
            f"there is no vLLM {f'in {folder}' if folder else 'here'}; its Python files are "
            "enough: python -m m4_prefix_chunked.tools.vllm.fetch 0.33.0"
        )
    paths = [str(path.resolve()) for path in (folder, folder.parent / "packages") if path.is_dir()]
    sys.path += paths
    before = os.environ.get("PYTHONPATH")  # vLLM looks at model classes in a process of its own
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([before] if before else [])])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    name = "python -m m4_prefix_chunked.tools.vllm.fetch"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=Formatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="0.33.0, or newest")
    parser.add_argument(
        "--to", type=Path, default=HERE, metavar="FOLDER", help="where to keep them"
    )
    args = parser.parse_args(arguments)

    def fetch_all() -> None:
        for version in args.versions:
            print(fetch(version, args.to))

    return ended_in_one_line(fetch_all)


if __name__ == "__main__":
    sys.exit(main())
