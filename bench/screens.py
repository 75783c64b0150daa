"""Writes the screens of docs/seeing.md again, from real small runs on this machine's CPU and the commands' output.

python bench/screens.py            writes docs/screens/
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SCREENS = REPO / "docs" / "screens"
CONFIG = "01_debug_sft.py"
RUNS = {"lr-2e-3": "2e-3", "lr-2e-4": "2e-4"}
"""Names of runs, and their learning rates."""
SETTINGS = [
    *("target.device=cpu", "train.steps=60", "train.log_every=1", "train.eval_every=10", "train.save_every=60"),
    *("data.seq_len=128", "data.max_train_rows=600", "data.max_eval_rows=8", "train.profile_steps=[30]"),
    *("model.hidden_size=64", "model.intermediate_size=192", "model.num_layers=2"),
]
MOST_BYTES = 150_000
WATCHED_S = 30.0
"""Seconds for a run to begin and for top to show some of it."""
CLIENT = "import sys; sys.argv[0] = 'torchferry'; from deployer.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class User:
    """A user with an empty home and a project with one config."""

    home: Path

    @property
    def project(self) -> Path:
        return self.home / "project"

    @property
    def env(self) -> dict[str, str]:
        env = {**os.environ, "HOME": str(self.home), "PYTHONPATH": str(REPO), "NO_COLOR": "1", "COLUMNS": "100"}
        return {**env, "LINES": "32", "TORCHFERRY_STATE_DIR": str(self.home / "state"), "PYTHONUTF8": "1"}

    def run(self, *words: str) -> str:
        """The output of `torchferry` with these words; its errors are printed by this program."""
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, *words], cwd=self.project, env=self.env, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            sys.exit(f"torchferry {' '.join(words)} ended with {done.returncode}")
        return done.stdout


def main() -> None:
    SCREENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="torchferry-screens-") as folder:
        user = User(Path(folder))
        user.project.mkdir()
        shutil.copy(REPO / "configs" / CONFIG, user.project)
        for name in RUNS:
            train(user, name)
        show(user)
        show_running(user)
    for file in sorted(SCREENS.iterdir()):
        size = file.stat().st_size
        print(f"{file.relative_to(REPO)}  {size:,} B")
        if size > MOST_BYTES:
            sys.exit(f"{file.name} has more than {MOST_BYTES:,} bytes")


def train(user: User, name: str, *more: str) -> None:
    rate = f"optim.learning_rate={RUNS.get(name, '1e-3')}"
    words = ("--python", sys.executable, "--name", name, "--no-pull", "--env", "OMP_NUM_THREADS=1")
    user.run(CONFIG, *words, *SETTINGS, rate, *more)


def show(user: User) -> None:
    names = list(RUNS)
    write("plot.txt", ["plot", *names], user.run("plot", *names))
    user.run("plot", *names, "--png", str(SCREENS / "plot.png"))
    page = user.home / "report.html"
    user.run("report", names[0], "-o", str(page))
    for file, scheme in (("report.png", "1"), ("report-dark.png", "0")):
        picture(page, SCREENS / file, scheme)


def show_running(user: User) -> None:
    """Writes the output of ps and top while a third run is active."""
    if shutil.which("tmux") is None:
        print("no tmux: ps.txt and top.txt stay as they are")
        return
    train(user, "long", "train.steps=100000", "--detach")
    time.sleep(WATCHED_S)
    write("ps.txt", ["ps"], user.run("ps"))
    socket, words = str(user.home / "tmux"), shlex.join([sys.executable, "-c", CLIENT, "top"])
    tmux = ["tmux", "-u", "-S", socket]
    subprocess.run(
        [*tmux, "new-session", "-d", "-x", "100", "-y", "32", words], cwd=user.project, env=user.env, check=True
    )
    try:
        time.sleep(WATCHED_S)
        screen = subprocess.run([*tmux, "capture-pane", "-p"], env=user.env, check=True, capture_output=True, text=True)
        write("top.txt", ["top"], screen.stdout)
    finally:
        subprocess.run([*tmux, "kill-server"], env=user.env, check=True)
        user.run("stop", "long", "--force")


def write(file: str, words: Sequence[str], shown: str) -> None:
    (SCREENS / file).write_text(f"$ torchferry {' '.join(words)}\n{shown}", encoding="utf-8")


def picture(page: Path, file: Path, scheme: str) -> None:
    """A screenshot of the top of a page, if a browser is installed."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"no chromium: {file.name} stays as it is")
        return
    quiet = [
        *("disable-gpu", "disable-quic", "disable-background-networking", "disable-component-update", "no-sandbox"),
        *("disable-sync", "no-first-run", "hide-scrollbars", f"blink-settings=preferredColorScheme={scheme}"),
    ]
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--{option}" for option in (*quiet, f"user-data-dir={profile}", f"screenshot={file}")]
        command = [browser, "--headless", *options, "--window-size=1080,1210", page.as_uri()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
