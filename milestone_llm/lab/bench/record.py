"""Where a measurement comes from: command, date, commit, machine, versions. Unknown values are
`unknown`."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FIELDS = ("command", "date", "commit", "machine", "versions")
LIBRARIES = ("torch", "transformers", "triton")


def made_by(command: Sequence[str]) -> dict[str, str]:
    """Return the fields of a record that is made now.

    Args:
        command: its words. Of an absolute path only the last part is kept: it differs by machine.
    """
    words = [Path(word).name if os.path.isabs(word) else word for word in command]
    fields = shlex.join(words), date.today().isoformat(), commit(), machine(), versions()
    return dict(zip(FIELDS, fields, strict=True))


def front_matter(data: Mapping[str, Any]) -> str:
    """Return the fields as the head of a Markdown record, in YAML."""
    lines = [
        f"{name}: {json.dumps(data[name]) if ': ' in data[name] else data[name]}" for name in FIELDS
    ]
    return "\n".join(["---", *lines, "---", "", ""])


def commit() -> str:
    """Return the commit of this source code, and whether the code has changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.check_output(
            [*git, "rev-parse", "--short", "HEAD"], stderr=subprocess.DEVNULL, text=True
        )
        changes = subprocess.check_output([*git, "diff", "HEAD", "--name-only"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + " with changes" * bool(changes)


def machine() -> str:
    """Return CPU, cores, load and GPUs in words, which a figure depends on."""
    import torch

    from milestone_llm.models.machine import usable_cores

    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    gpus = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return ", ".join([f"CPU {cpu_name()}", f"{usable_cores()} cores", f"load {load}", *gpus])


def cpu_name() -> str:
    """Return the CPU's name, as the system has it."""
    facts = Path("/proc/cpuinfo")
    text = facts.read_text(encoding="utf-8") if facts.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, flags=re.M)
    return found[1] if found else platform.processor() or "unknown"


def versions() -> str:
    """Return the versions of Python and of the libraries that compute."""
    installed = [f"{name} {version(name)}" for name in LIBRARIES if find_spec(name)]
    return ", ".join([f"Python {platform.python_version()}", *installed])
