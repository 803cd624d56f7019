"""What pip installs: a wheel that runs from any folder; a source distribution with its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta as b; b.build_wheel({0!r}); b.build_sdist({0!r})"


def python(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with both distributions, built of a copy: the checkout gets no build/."""
    if not (ROOT / ".git").exists():
        pytest.skip("git says which files there are")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    done = python(copy, "-c", BUILD.format(str(out)))
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_the_wheel_runs_from_any_folder(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "import m3_paged, milestone_llm as m; print(m.__file__, m3_paged.LLM('tiny-llama'))"
    done = python(elsewhere, "-c", code, path=site)
    assert str(site) in done.stdout, done.stderr
    done = python(
        elsewhere, "-m", "milestone_llm", "--milestone", "m2", "demo", "--help", path=site
    )
    assert done.returncode == 0, done.stderr
    pack = "milestone_llm.lab.playground.browser.pack"
    done = python(elsewhere, "-m", pack, "page", path=site)
    assert (done.returncode, "in a checkout" in done.stderr) == (2, True)


@pytest.mark.slow
def test_the_source_distribution_has_what_its_tests_need(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    for name in ("tests/helpers/engines.py", "tests/conftest.py", "constraints.txt",
                 "docs/tiny_engine.py", "exercises/build/check.py", "CHANGELOG.md"):  # fmt: skip
        assert name in names


def test_where_a_library_is_missing_an_import_raises_import_error(tmp_path):
    """Not SystemExit, which would end a notebook or a server that only tries."""
    code = (
        "import sys; sys.modules.update(torch=None)\n"
        "try:\n    from m1_single import LLMEngine\n"
        "except ImportError as error:\n    print(error)"
    )
    done = python(tmp_path, "-c", code, path=ROOT)
    assert "pip install milestone-llm" in done.stdout, done.stderr
