"""What README and docs say exists: options, keys, files; and the first screen's commands run."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from deployer.cli import cli
from tests.support.ferry import REPO
from trainer.commands.cli import COMMANDS, load_command, train_command
from trainer.config.keys import DROPPED, known_keys

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def commands_in(page: Path) -> list[str]:
    """Every shell command of a page's console blocks, continued lines joined, comments cut."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [re.sub(r"\s+# .*", "", line[2:]).strip() for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_that_a_page_links_exists(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).stat().st_size > 0, target


def test_every_module_that_the_architecture_names_exists():
    named = set(re.findall(r"`([\w/]+\.py)`", (REPO / "docs" / "architecture.md").read_text()))
    files = [
        f"/{path.relative_to(REPO)}" for top in ("deployer", "trainer", "tests") for path in (REPO / top).rglob("*.py")
    ]
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert len(named) > 20 and missing - {"deploy.py", "torchferry.py", "train.py"} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_option_that_a_page_names_exists(page):
    known = {
        "--shm-size",
        "--ipc",
        "--delete",
        "--standalone",
        "--nproc-per-node",
        "--max-restarts",
        "--redirects",
        "--frozen",
        "--no-python",
        "--query-gpu",
        "--format",
        "--help",
        "--write",
    }
    for command in (*cli.commands.values(), train_command, *map(load_command, COMMANDS)):
        known |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for program in (*(REPO / "bench").glob("*.py"), REPO / "tests" / "world" / "__main__.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', program.read_text()))
    text = re.sub(r"https?://\S+", "", page.read_text())
    if page.name == "neighbours.md":  # the first column is theirs
        text = re.sub(r"^\| .*? \| ", "| ", text, flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_config_key_that_a_page_names_exists(page):
    sections = "|".join({key.partition(".")[0] for key in known_keys() if "." in key})
    known = {*known_keys(), *(DROPPED if page.name == "config.md" else ())}
    for key in re.findall(rf"`?(?<![\w./])((?:{sections})\.[a-z_]+)(?![\w./(])", page.read_text()):
        of_the_model = key in ("model.embed_tokens", "model.layers", "model.norm")
        assert key in known or of_the_model or key.endswith((".py", ".sh", ".yaml")), key


def test_first_screen_commands_are_understood_as_they_stand(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(REPO / "configs")
    (tmp_path / "my_train.py").touch()  # the reader's own
    (tmp_path / "my.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    tried = 0
    for command in commands_in(REPO / "README.md"):
        words = shlex.split(command)
        if (
            words[0] != "torchferry"
            or (words[1] in cli.commands and words[1] not in ("run", "sft"))
            or words[1].startswith("lora")
        ):
            continue
        words = [w for w in words[1:] if w != "--dry-run"]
        at = words.index("--") if "--" in words else len(words)
        result = runner.invoke(cli, [*words[:at], "--dry-run", "--json", *words[at:]])
        assert result.exit_code == 0, (command, result.output, result.exception)
        assert json.loads(result.stdout)["command"]
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize(("page", "at_least"), [("hardening.md", 250), ("security.md", 25)])
def test_every_test_that_a_page_names_exists(page, at_least):
    named = re.findall(r"`(?:gpu/)?(test_\w+)\.py::(test_\w+)`", (REPO / "docs" / page).read_text())
    paths = list((REPO / "tests").rglob("test_*.py"))
    have = {path.stem: path.read_text() for path in paths}
    assert len(have) == len(paths)  # a name says which file it is
    assert len(named) > at_least
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in have.get(file, "")] == []


def test_every_comparison_that_the_hardening_page_names_exists():
    training = (REPO / "docs" / "hardening.md").read_text().partition("## Training")[2]
    lists = re.findall(r"_of_the_oracle` \(([^)]*)\)", training)
    named = {name for text in lists for name in re.findall(r"\*([^*]+)\*", text)}
    rows = (REPO / "docs" / "correctness.md").read_text().splitlines()
    assert len(named) > 5
    assert named - {row.split(" | ")[0].removeprefix("| ") for row in rows} == set()


def test_list_of_commands_is_whole_on_80_columns():
    shown = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    listed = shown.partition("Commands:\n")[2].partition("Exit codes:\n")[0].splitlines()
    sections = [line for line in listed if line and not line.startswith(" ")]
    listed = [line for line in listed if line.startswith(" ")]
    assert len(sections) == 1 and sorted(line.split()[0] for line in listed) == sorted(cli.commands)
    assert not [line for line in listed if line.endswith("...")]


def test_help_of_run_says_where_a_program_writes_what_comes_home():
    assert "$TORCHFERRY_RUN_DIR" in CliRunner().invoke(cli, ["run", "--help"]).output
