"""Words of other tools: each is refused with the line that says it here, and that line is understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from deployer.cli import cli
from deployer.commands.neighbours import ABSENT, COMMANDS, OPTIONS
from deployer.errors import UsageError
from tests.support.ferry import Ferry
from trainer.config.keys import known_keys

LINES = [  # what is typed, and what is to be typed here
    ("list", "ps"),
    ("ls -a", "ps --all"),
    ("queue gpu-box", "ps --ssh gpu-box"),
    ("squeue -u me", "ps (without -u me)"),
    ("cancel job-1", "stop job-1"),
    ("scancel 12 13", "stop 12 13"),
    ("kill -9 job-1", "stop --force job-1"),
    ("down -y job-1", "stop job-1 (without -y)"),
    ("cancel --all", "stop --all"),
    ("terminate", "stop ID"),
    ("describe job-1", "status job-1"),
    ("graph job-1 job-2", "plot job-1 job-2"),
    ("attach job-1", "logs --follow job-1"),
    ("tail -f -n 5 job-1", "logs --follow --tail 5 job-1"),
    ("restart job-1", "resume job-1"),
    ("rerun job-1", "repeat job-1"),
    ("port-forward job-1 8888", "tunnel job-1 8888"),
    ("retry job-1 --lr 1e-4", "resume job-1 optim.learning_rate=1e-4"),
    ("download job-1 out", "pull job-1 out"),
    ("rsync -av job-1:out/w.pt .", "pull --to . job-1 out/w.pt (without -av)"),
    ("ssh job-1", "shell job-1"),
    ("ssh root@box", "shell --ssh root@box"),
    ("ssh -p 22 root@box", "shell --ssh 'ssh -p 22 root@box'"),
    ("nvidia-smi", "gpus"),
    ("rm job-1", "gc (without job-1)"),
    ("check gpu-box", "doctor --ssh gpu-box"),
    ("jobs cancel 3", "stop 3"),
    ("jobs logs 3", "logs 3"),
    ("launch task.yaml", "run task.yaml"),
    ("launch -c box sky.yaml", "convert sky.yaml -o torchferry.yaml; then deploy.py run --ssh box"),
    ("cancel mycluster 3", "stop ID"),
    ("scp a.txt job-1:", "push job-1 a.txt"),
    ("rsync -a data job-1:in/", "push --into in/ job-1 data (without -a)"),
    ("upload job-1 a.txt", "push job-1 a.txt"),
    ("sft --model_name_or_path m --dataset_name d --lr 1", "sft --model m --data d optim.learning_rate=1"),
    ("trl sft --model_name_or_path m --dataset d --use_peft", "sft --model m --data d --lora"),
    ("apply -f task.yaml", "run task.yaml"),
    ("submit c.py --lr 1e-4", "run c.py optim.learning_rate=1e-4"),
    ("launch -c box --num-gpus=2 t.py --lr 1", "run --ssh box --gpus auto:2 -- python t.py --lr 1"),
    (
        "sbatch --gres=gpu:a100:4 --time 2:05:00 j.sh 'a b'",
        "run --gpus auto:4 --max-runtime 2h05m00s -- bash j.sh 'a b'",
    ),
    ("srun --nodes 1 sh -c true", "run -- sh -c true; a job runs on one host"),
    ("submit", "run CONFIG"),
    ("c.py --lr 1e-4", "run c.py optim.learning_rate=1e-4"),
    ("c.py --learning-rate=1e-4 --num-epochs 3", "run c.py optim.learning_rate=1e-4 train.epochs=3"),
    ("run --epochs 3 --batch-size 4 c.py", "run c.py train.epochs=3 train.micro_batch_size=4"),
    ("run -n 2 --model Qwen/Q c.py a.b=1", "run --gpus auto:2 c.py a.b=1 model.name=Qwen/Q"),
    ("c.py --nproc_per_node 2 --detach", "run --gpus auto:2 --detach c.py"),
    ("c.py --num-gpus", "run --gpus auto:N c.py"),
    ("c.py --packing --bf16", "run c.py data.packing=true train.precision=bf16"),
    ("c.py --packing False", "run c.py data.packing=false"),
    ("c.py --lr", "run c.py optim.learning_rate=VALUE"),
    ("c.py --output-dir out", f"run c.py; {ABSENT['--output-dir']}"),
    ("run --lr 1 --gpus 0 -- python t.py", "run --gpus 0 -- python t.py --lr 1"),
    ("run t.py --lr 1", "run -- python t.py --lr 1"),
    ("resume job-1 --lr 1e-4", "resume job-1 optim.learning_rate=1e-4"),
    ("ps -a", "ps --all"),
    ("stop -9 job-1", "stop --force job-1"),
    ("logs -n 5 job-1", "logs --tail 5 job-1"),
    ("shel job-1", "shell job-1"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.py").write_text("import torch\n")
    (tmp_path / "c.py").write_text("from trainer.schema import Config\n\nconfig: Config = Config()\n")
    (tmp_path / "sky.yaml").write_text("resources: {accelerators: A100}\nrun: true\n")
    (tmp_path / "download").mkdir()  # a folder is no config
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(line: str) -> UsageError:
    raised = CliRunner().invoke(cli, shlex.split(line)).exception
    assert isinstance(raised, UsageError), (line, raised)
    return raised


def is_understood(words: list[str]) -> bool:
    """Whether the command line takes these words, as far as it looks before anything is done."""
    command = cli.commands[words[0]]
    return command.make_context(words[0], words[1:]).params is not None


@pytest.mark.parametrize(("typed", "here"), LINES)
def test_word_of_another_tool_is_refused_with_the_line_that_is_understood_here(
    folder: Path, typed: str, here: str
) -> None:
    error = refusal(typed)
    assert error.hint == f"did you mean: deploy.py {here}"
    assert re.match(r"\S+ is neither a command nor a config file|no such option: -", error.message)
    line = shlex.split(re.sub(r"( \(without .*\))?(; .*)?\Z", "", here))
    assert is_understood([word.replace("auto:N", "auto:1").replace("VALUE", "1") for word in line])


def test_every_word_is_tried_and_none_is_a_command_of_ours() -> None:
    words = [word for row in COMMANDS.values() for word in row.split()]
    assert len(words) == len(set(words))
    assert set(words) & cli.commands.keys() == set(), "it is a command now: drop it from the table"
    for word in words:
        assert re.fullmatch(r"did you mean: deploy\.py \S+.*", refusal(f"{word} job-1").hint), word
    tried = {here.split()[0] for _, here in LINES}
    assert {ours.split()[0] for ours in COMMANDS} <= tried


def test_every_command_option_and_key_that_the_tables_name_exists() -> None:
    for ours in COMMANDS:
        name, *options = ours.split()
        assert is_an_option(name, *options), ours
    templates = [(name, template) for name, table in OPTIONS.items() for template in table]
    for name, template in templates:
        word, _, value = template.partition("=")
        assert word in known_keys() if value else template == "{}" or is_an_option(name, template.split()[0]), template
    assert len(templates) > 15


def is_an_option(name: str, *options: str) -> bool:
    known = [opt for param in cli.commands[name].params if isinstance(param, click.Option) for opt in param.opts]
    return set(options) <= set(known)


def test_no_option_of_ours_is_called_another_tools() -> None:
    theirs = [(name, option) for name, table in OPTIONS.items() for row in table.values() for option in row.split()]
    assert len(theirs) == len(set(theirs))
    assert [
        (name, option) for name, option in [*theirs, *(("run", o) for o in ABSENT)] if is_an_option(name, option)
    ] == []


@pytest.mark.parametrize("name", ["list.yaml", "queue.py", "sync"])
def test_config_that_is_there_comes_first(folder: Path, name: str) -> None:
    (folder / name).write_text("nonsense: 1\n" if name.endswith("yaml") else "config = 1\n")
    assert "neither a command" not in refusal(Path(name).name).message


def test_other_words_and_options_are_refused_as_before(folder: Path) -> None:
    assert refusal("nonsense").hint.endswith("--help lists the commands")
    assert isinstance(
        CliRunner().invoke(cli, ["c.py", "--no-pul"], standalone_mode=False).exception, click.NoSuchOption
    )
    assert "put -- before a program: deploy.py run -- python t.py" in refusal("python t.py").hint


def test_refusal_ends_with_2_starts_nothing_and_names_the_program_as_it_was_called(ferry: Ferry) -> None:
    ferry.write("t.py", "open('ran', 'w')")
    for words in (("launch", *ferry.where(), "t.py"), ("run", "--lr", "1", *ferry.where(), "t.py")):
        done = ferry.run(*words)
        line = shlex.join([*ferry.argv("run", *ferry.where()), "--", "python", "t.py"])
        assert done.returncode == 2 and f"did you mean: {line}" in done.stderr.decode(), done.stderr
    assert ferry.job_ids() == [] and not (ferry.project / "ran").exists()
