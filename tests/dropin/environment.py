# SPDX-License-Identifier: Apache-2.0
"""Environments with nvidia-modelopt, the larger library: as it is published, and with our files in.

    python tests/dropin/environment.py FOLDER

makes one with our files in FOLDER. The published one takes a minute and 2 GB; it is made once, in
`.dropin/`, and is never changed after that.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# torch goes first and stays: what asks for a later one would bring a build with CUDA along.
TORCH = "torch==2.13.0"
REQUIREMENTS = (TORCH, "nvidia-modelopt[hf]==0.47.0", "transformers>=4.57,<5.15")
# All ranks of a job end within this, their start of some ten seconds included.
JOB_SECONDS = 240.0

Completed = subprocess.CompletedProcess[str]


class Environment(NamedTuple):
    """A virtual environment that holds the library."""

    folder: Path

    @property
    def python(self) -> Path:
        """Return its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Return the folder that holds its packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    @property
    def library(self) -> Path:
        """Return the library's package."""
        return self.site_packages / "modelopt"

    def run(self, *command: str | Path, cwd: Path = ROOT) -> Completed:
        """Run a command as a shell in which the environment is active would."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # Nothing of this checkout or of its own environment may be found.
        env.pop("PYTHONPATH", None)
        env["VIRTUAL_ENV"] = str(self.folder)
        env["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{env['PATH']}"
        # torchrun's default port may be another job's.
        env.update(PET_RDZV_BACKEND="c10d", PET_RDZV_ENDPOINT="localhost:0")
        # torchrun leaves a folder behind in TMPDIR.
        with tempfile.TemporaryDirectory() as env["TMPDIR"]:
            return subprocess.run(
                [str(part) for part in command],
                capture_output=True,
                text=True,
                timeout=JOB_SECONDS,
                check=False,
                cwd=cwd,
                env=env,
            )


def published() -> Environment:
    """Return the environment with the library as it is published, made unless it is there."""
    environment = Environment(ROOT / ".dropin" / "environment")
    environment.folder.parent.mkdir(exist_ok=True)
    with (environment.folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Written last: without it the environment is a half-made one.
        stamp = environment.folder / "made-of"
        made_of = "\n".join([sys.version, *REQUIREMENTS])
        if not stamp.exists() or stamp.read_text() != made_of:
            shutil.rmtree(environment.folder, ignore_errors=True)
            venv = [sys.executable, "-m", "venv", str(environment.folder)]
            subprocess.run(venv, check=True)
            pip = [str(environment.python), "-m", "pip", "install", "--quiet"]
            for requirements in ([TORCH], REQUIREMENTS):
                subprocess.run([*pip, *requirements], check=True)
            stamp.write_text(made_of)
    return environment


def dropped_in(folder: Path) -> Environment:
    """Make an environment with a copy of the library in `folder`, and put our files into it.

    The README's lines do that, as written. All other packages are those of the published one.
    """
    original, environment = published(), Environment(folder)
    subprocess.run([original.python, "-m", "venv", "--without-pip", folder], check=True)
    shutil.copytree(original.library, environment.library)
    (environment.site_packages / "published.pth").write_text(f"{original.site_packages}\n")
    # What pip writes, but for its first line, which names the interpreter.
    script = (original.folder / "bin" / "torchrun").read_text().split("\n", 1)[1]
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(f"#!{environment.python}\n{script}")
    torchrun.chmod(0o755)
    done = environment.run("bash", "-euc", readme_block("bash"))
    if done.returncode:
        raise RuntimeError(f"the README's lines failed: {done.stderr}")
    return environment


def readme_block(language: str) -> str:
    """Return the code block of this language in the README's section on the library."""
    section = (ROOT / "README.md").read_text().partition("\n## In nvidia-modelopt\n")[2]
    blocks = re.findall(
        r"^```(\w+)\n(.*?)^```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE
    )
    [block] = [text for of_language, text in blocks if of_language == language]
    return str(block)


if __name__ == "__main__":
    print(dropped_in(Path(sys.argv[1])).python)
