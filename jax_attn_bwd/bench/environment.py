"""Where and when a measurement was made: device, versions, commit."""

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import jax

import jax_attn_bwd


def environment() -> dict[str, str]:
    """Returns {what: its version}, of what the measurements depend on."""
    device = jax.devices()[0]
    cpu = f"{_processor()}, {_cores()} cores"
    versions = {}
    for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "tokamax"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "platform": device.platform,
        "device": cpu if device.platform == "cpu" else device.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "jax_attn_bwd": jax_attn_bwd.__version__,
        "commit": commit(Path(jax_attn_bwd.__file__)),
        **versions,
    }


def commit(package: Path) -> str:
    """Finds the commit of the file `package`, "-dirty" if its folder differs; "unknown" without one."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], cwd=package.parent, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", package.name)  # not merely a folder inside a repository
        changed = git("status", "--porcelain", "--", ".", ":(exclude)bench/results")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or does not know it
        return "unknown"


def _processor() -> str:
    """Finds the CPU's name, where the system tells: libraries that are beside one another differ by it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return f"{platform.machine()} CPU ({names[0]})" if names else f"{platform.machine()} CPU"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
