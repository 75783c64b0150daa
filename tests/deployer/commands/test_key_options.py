"""Options that mirror keys: from the words of a command line to the keys of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployer.commands.key_options import KeyOption, take_changes
from deployer.commands.launch.cli import resume, run
from deployer.errors import UsageError
from deployer.plan.options import Options, read_config
from trainer.config.load import config_from_dict, config_to_dict
from trainer.schema import Config, with_changes

WORDS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("--ssh box", {"target.ssh": "box"}),
    ("--gpus 2,0", {"target.gpu_ranks": [2, 0]}),
    ("--gpus GPU-8932f937", {"target.gpu_ranks": ["GPU-8932f937"]}),
    ("--gpus auto:2", {"target.gpu_ranks": ["auto:2"]}),
    ("--device cpu", {"target.device": "cpu"}),
    ("--name try", {"run.name": "try"}),
    ("--env A=1 --env B=x=y --env A=", {"target.env.A": "", "target.env.B": "x=y"}),
    ("--secret A --secret B", {"target.secrets": ["A", "B"]}),
    ("--env-file .env", {"target.env_file": ".env"}),
    ("--setup make --setup-timeout 5m", {"target.setup": "make", "target.setup_timeout_s": 300.0}),
    ("--out ./out/ --out a/b.pt", {"target.outputs": ["out", "a/b.pt"]}),
    ("--remote-root /r", {"target.root": "/r"}),
    ("--python /p", {"target.python": "/p"}),
    ("--queue", {"target.queue": True}),
    ("--max-restarts 0", {"target.max_restarts": 0}),
    ("--max-runtime 2h", {"target.max_runtime_s": 7200.0}),
    ("--stall-timeout 1h30m", {"target.stall_timeout_s": 5400.0}),
    ("--after a-1 --after b-2", {"target.after": ["a-1", "b-2"]}),
    ("--idle-timeout 30m", {"target.idle_timeout_s": 1800.0}),
    ("--log-max 2.5GB", {"target.log_max_gb": 2.5}),
    ("--log-max 0", {"target.log_max_gb": 0.0}),
]


@pytest.mark.parametrize(("words", "changes"), WORDS)
def test_words_of_an_option_become_its_key_as_the_schema_holds_it(words: str, changes: dict[str, Any]) -> None:
    with run.make_context("run", words.split()) as context:
        assert take_changes(context.params) == changes
    config = with_changes(Config(), changes)
    assert config_from_dict(config_to_dict(config)) == config


def test_every_such_option_is_tried_here() -> None:
    keys = {option.key for option in run.params if isinstance(option, KeyOption)}
    tried = {key for _, changes in WORDS for key in changes}
    assert {key for key in keys if not any(f"{name}.".startswith(f"{key}.") for name in tried)} == set()


def test_place_of_a_resume_is_where_its_job_is_and_changes_nothing() -> None:
    words = ["job-1", "--ssh", "box", "--remote-root", "/r", "--gpus", "0,1", "--secret", "A", "--max-runtime", "30s"]
    with resume.make_context("resume", words) as context:
        place = {name: context.params.pop(name) for name in ("ssh", "root")}
        changes = take_changes(context.params)
    assert place == {"ssh": "box", "root": "/r"}
    assert changes == {"target.gpu_ranks": [0, 1], "target.secrets": ["A"], "target.max_runtime_s": 30.0}


# --- over a config ----------------------------------------------------------------------------------------------------

TWO_GPUS = "target:\n  train_backend: pytorch\n  gpu_ranks: [0, 1]\n  secrets: [A]\n  env: {X: '1'}\n"


def over_two_gpus(folder: Path, **keys: Any) -> Options:
    (folder / "a.yaml").write_text(TWO_GPUS)
    return Options(config=str(folder / "a.yaml"), keys={f"target.{name}": value for name, value in keys.items()})


def test_config_is_judged_with_the_options_over_it(tmp_path: Path) -> None:
    options = over_two_gpus(tmp_path, gpu_ranks=[1], secrets=["A", "B"], **{"env.Y": "2"})
    config, command, given = read_config(options)
    assert command is None and config.target.gpu_ranks == [1]
    assert config.target.secrets == ["A", "B"] and config.target.env == {"X": "1", "Y": "2"}
    named = {f"target.{name}" for name in ("train_backend", "gpu_ranks", "secrets", "env")}
    assert given == {*named, "run.name"}  # after its file


@pytest.mark.parametrize(
    ("keys", "says", "where"),
    [
        ({}, "target.train_backend is pytorch, one process", "a.yaml:2"),
        ({"gpu_ranks": [0, 0]}, "target.gpu_ranks is [0, 0]: it names 0 twice", "the command line"),
        ({"gpu_ranks": [0], "secrets": ["RANK"]}, "target.secrets may not set RANK", "the command line"),
        ({"gpu_ranks": [0], "env.A": "2"}, "A is in both target.env and target.secrets", "the command line"),
    ],
)
def test_error_names_the_file_or_the_command_line(tmp_path: Path, keys: Any, says: str, where: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_config(over_two_gpus(tmp_path, **keys))
    assert raised.value.message.startswith(says)
    assert raised.value.where[0].endswith(where)
