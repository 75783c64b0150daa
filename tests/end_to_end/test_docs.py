"""What README and docs say exists: options, keys, files; and the first screen's commands run."""

import json
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from deployer.agent.host.layout import Job
from deployer.agent.job.status import State
from deployer.cli import cli
from tests.support.ferry import REPO
from trainer.commands.cli import COMMANDS, load_command, train_command
from trainer.config.keys import DROPPED, known_keys
from trainer.schema import CHECKPOINTS_DIR, EXPORT_DIR, MEMORY_PLAN_FILE, METRICS_FILE, OUTCOME_FILE, SAMPLES_FILE

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]


def commands_in(page: Path) -> list[str]:
    """Every shell command of a page's console blocks, continued lines joined, comments cut."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [re.sub(r"\s+# .*", "", line[2:]).strip() for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_that_a_page_links_exists(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).stat().st_size > 0, target


@pytest.mark.parametrize(("page", "at_least"), [("parts.md", 80), ("internals.md", 50)])
def test_every_module_and_folder_that_a_page_of_the_code_names_exists(page, at_least):
    text = (REPO / "docs" / page).read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    files = [
        f"/{path.relative_to(REPO)}" for top in ("deployer", "trainer", "tests") for path in (REPO / top).rglob("*.py")
    ]
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert len(named) > at_least and missing - {"deploy.py", "torchferry.py", "train.py"} == set()
    folders = re.findall(r"`((?:deployer|trainer|tests)/[\w/]*)`", text)
    assert [name for name in folders if not (REPO / name).is_dir()] == []


def table_below(title: str, page: str) -> list[list[str]]:
    """The cells of each row of the first table below a heading, without the table's head."""
    below = (REPO / "docs" / page).read_text().partition(f"\n## {title}\n")[2]
    rows = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def test_architecture_is_read_in_one_sitting():
    assert len((REPO / "docs" / "architecture.md").read_text().split()) < 1700


def test_each_term_of_the_vocabulary_is_defined_once():
    rows = table_below("Vocabulary", "architecture.md")
    terms = [term.strip("*") for term, _ in rows]
    assert len(terms) >= 30 and len(set(terms)) == len(terms)
    assert [row for row in rows if row[0] != f"**{row[0].strip('*')}**" or not 2 <= len(row[1].split()) <= 20] == []
    pages = {page: re.findall(r"^\| \*\*([^*]+)\*\* \|", page.read_text(), re.MULTILINE) for page in PAGES}
    assert [page.name for page, found in pages.items() if page.name != "architecture.md" and {*found} & {*terms}] == []


def test_vocabulary_has_the_states_that_a_job_can_have():
    meaning = dict(table_below("Vocabulary", "architecture.md"))["**state**"]
    assert tuple(re.split(", | or ", meaning)) == get_args(State)


def test_architecture_shows_every_file_that_the_host_and_the_trainer_keep_of_a_job():
    table = " ".join(row[0] for row in table_below("The run folder", "architecture.md"))
    shown = {path.split("/")[0] for path in re.findall(r"`([^`]+)`", table)}
    job = Job("/jobs/a-job")
    inside = [path for path in vars(job).values() if path.startswith(f"{job.path}/")]
    of_the_host = {"logs", "ranks", *(Path(path).relative_to(job.path).parts[0] for path in inside)}
    of_the_trainer = {METRICS_FILE, SAMPLES_FILE, OUTCOME_FILE, CHECKPOINTS_DIR, EXPORT_DIR, MEMORY_PLAN_FILE}
    assert (of_the_host | of_the_trainer) - shown == set()


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
        "--nodes",
        "--ntasks-per-node",
        "--pty",
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
