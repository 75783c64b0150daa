"""Config files in Python and YAML: what is no config, wrong values with their lines, values of equal meaning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config.load import (
    ConfigError,
    load_config,
)
from trainer.schema import (
    Config,
    ModelConfig,
    RunConfig,
)

IMPORT = "from trainer.schema import *\n"


def test_missing_file_names_the_nearest_one(load_config_file: Any) -> None:
    Path("sft_small.py").touch()
    with pytest.raises(ConfigError) as caught:
        load_config("sft_smal.py")
    assert caught.value.render() == "Error: config sft_smal.py does not exist\nhint: did you mean sft_small.py?"


def test_folder_as_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.toml", "x", "Error: config a.toml ends in .toml\nhint: a config is a .py, .yaml or .yml file"),
        ("a", "x", "Error: config a has no suffix\nhint: a config is a .py, .yaml or .yml file"),
        ("a.py", " \n", "Error: config a.py is empty"),
        ("a.yaml", "", "Error: config a.yaml is empty"),
        ("a.yml", "# nothing\n", "Error: config a.yml is empty\n  in a.yml"),
    ],
)
def test_file_that_is_no_config_gives_one_error(load_config_file: Any, name: str, text: str, error: str) -> None:
    assert load_config_file(name, text) == error


def test_python_file_that_binds_no_config_is_not_run(load_config_file: Any) -> None:
    program = "open('ran', 'w')\ndef main():\n    config = 1\nnames = [config for config in 'ab']\n"
    assert load_config_file("a.py", program).endswith("for a program of your own: deploy.py run -- python FILE")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "binding",
    [
        "if True:\n  try:\n    config: Config = made\n  finally: pass",
        "from helper import made as config",
        "from helper import *",
        "for config in [made]: pass",
        "_, config = 0, made",
    ],
)
def test_python_config_may_bind_its_name_in_any_way(load_config_file: Any, binding: str) -> None:
    Path("helper.py").write_text(IMPORT + "config = made = Config()\n")
    assert load_config_file("a.py", f"{IMPORT}made = Config()\n{binding}\n") == Config()


PYTHON_ERRORS = {
    "syntax": ("x = (1,\n", "Error: syntax error: '(' was never closed\n  in a.py:1\nhint: x = (1,"),
    "no config": ("cfg = 3\n", "Error: a.py does not define config\n  in a.py\nhint: it must end with: config = "),
    "other name": (
        IMPORT + "c = Config()\n",
        "Error: a.py does not define config\n  in a.py\nhint: rename c to config",
    ),
    "not a Config": (
        "config = {}\n",
        "Error: config is a dict, expected a Config\n  in a.py\nhint: from trainer.schema",
    ),
    "raises": (
        "config = 1\ny = config / 0\n",
        "Error: the config raised ZeroDivisionError: division by zero\n  in a.py:2",
    ),
    "exits": ("config = exit(3)\n", "Error: the config raised SystemExit: 3\n  in a.py:1"),
    "import": (
        "import no_such_module as config\n",
        "Error: the config raised ModuleNotFoundError: No module named 'no_such_module'\n  in a.py:1\nhint: a ",
    ),
    "assignment": (
        IMPORT + "config = Config()\nconfig.train.steps = 5\n",
        "Error: the config raised FrozenInstanceError: cannot assign to field 'steps'\n  in a.py:3\nhint: configs do",
    ),
    "unknown keyword": (
        IMPORT + "config = Config(target=TargetConfig(\n  device='cpu',\n  gpu_rank=[0]))\n",
        "Error: target.gpu_rank is not a key\n  in a.py:4\nhint: did you mean target.gpu_ranks?",
    ),
    "unknown section": (
        IMPORT + "config = Config(trian=TrainConfig())\n",
        "Error: trian is not a key\n  in a.py:2\nhint: did you mean train?",
    ),
    "type": (
        IMPORT + "config = Config(target=TargetConfig(\n  gpu_ranks='0'))\n",
        "Error: target.gpu_ranks is '0', expected a list, each a whole number or text\n  in a.py:3\nhint: write it as",
    ),
    "wrong section class": (
        IMPORT + "config = Config(train=OptimConfig())\n",
        "Error: train is OptimConfig(",
    ),
    "rule": (
        IMPORT + "config = Config(\n  train=TrainConfig(epochs=2))\n",
        "Error: train.steps is 200 and train.epochs is 2: only one may say how long to train\n  in a.py:3\nhint: ",
    ),
}


@pytest.mark.parametrize(("text", "error"), PYTHON_ERRORS.values(), ids=PYTHON_ERRORS)
def test_wrong_python_config_gives_one_error_with_its_line(load_config_file: Any, text: str, error: str) -> None:
    message = load_config_file("a.py", text)
    assert message.startswith(error)
    assert message.count("\n") <= 2


def test_python_config_imports_from_its_own_folder_and_leaves_no_trace(load_config_file: Any, tmp_path: Path) -> None:
    for steps in (11, 12):
        folder = tmp_path / str(steps)
        folder.mkdir()
        (folder / "shared_settings.py").write_text(f"STEPS = {steps}\n")
        path = folder / "a.py"
        path.write_text(IMPORT + "from shared_settings import STEPS\nconfig = Config(train=TrainConfig(steps=STEPS))\n")
        before = list(sys.path)
        assert load_config(path).train.steps == steps
        assert sys.path == before
        assert "shared_settings" not in sys.modules


def test_syntax_error_in_an_imported_module_names_that_file(load_config_file: Any, tmp_path: Path) -> None:
    Path("broken_helper.py").write_text("ok = 1\nx = = 2\n")
    message = load_config_file("a.py", "import broken_helper as config\n")
    assert message.splitlines()[1] == f"  in {tmp_path / 'broken_helper.py'}:2"


def test_what_a_config_prints_goes_to_stderr(load_config_file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load_config_file("a.py", IMPORT + "print('hello')\nconfig = Config()\n")
    assert capsys.readouterr() == ("", "hello\n")


def test_python_values_of_equal_meaning_become_the_fields_type(load_config_file: Any) -> None:
    config = load_config_file(
        "a.py",
        IMPORT + "from pathlib import Path\n"
        "config = Config(target=TargetConfig(gpu_ranks=range(2)), optim=OptimConfig(learning_rate=1),\n"
        "  data=DataConfig(train=(Path('d') / 'x.jsonl',)), run={'name': 'r1'})\n",
    )
    assert (config.target.gpu_ranks, config.data.train) == ([0, 1], ["d/x.jsonl"])
    assert isinstance(config.optim.learning_rate, float)
    assert config.run == RunConfig(name="r1")


YAML_ERRORS = {
    "unknown key": (
        "train:\n  steps: 5\n  learning_rte: 1\n",
        "Error: train.learning_rte is not a key\n  in a.yaml:3\nhint: did you mean optim.learning_rate?",
    ),
    "unknown section": ("trian: {steps: 5}", "Error: trian is not a key\n  in a.yaml:1\nhint: did you mean train?"),
    "dotted key": (
        "train.steps: 5\n",
        "Error: train.steps is not a key here\n  in a.yaml:1\nhint: nest it: train: {steps: …}",
    ),
    "given twice": (
        "train:\n  steps: 5\n  steps: 6\n",
        "Error: train.steps is given twice\n  in a.yaml:2 and line 3",
    ),
    "not a mapping": ("\n- a\n", "Error: a.yaml is not a mapping of sections\n  in a.yaml:2"),
    "no YAML": (
        "train:\n\tsteps: 5\n",
        "Error: not valid YAML: found character '\\t' that cannot start any token\n  in a.yaml:2",
    ),
    "not UTF-8": (b"run: {name: \xff}", "Error: not valid YAML: invalid start byte\n  in a.yaml"),
    "no character": (
        'run: {name: "\\UFFFFFFFF"}',
        "Error: not valid YAML: it cannot be parsed\n  in a.yaml",
    ),
    "two documents": ("run: {}\n---\nrun: {}\n", "Error: not valid YAML: but found another document\n  in a.yaml:2"),
    "tag": (
        "run: !!python/object/apply:os.system [ls]\n",
        "Error: run has the YAML tag tag:yaml.org,2002:python/object/apply:os.system, which is not allowed\n"
        "  in a.yaml:1",
    ),
    "endless alias": ("data:\n  train: &a [*a]\n", "is nested too deeply\n  in a.yaml:2"),
    "section is a scalar": ("train: 5\n", "Error: train is 5, expected a TrainConfig (a section with keys)"),
    "words for a list": (
        "args: --lr 3\n",
        "Error: args is '--lr 3', expected a list, each text\n  in a.yaml:1\nhint: write it as a list: [--lr, 3]",
    ),
    "list element": (
        "data:\n  train:\n  - a.jsonl\n  - null\n",
        "Error: data.train[1] is null, expected text or a mapping of path, weight, repeat, limit\n  in a.yaml:4\n"
        'hint: put it in quotes if you mean the text: "nu',
    ),
    "entry with an unknown key": (
        "data:\n  train:\n  - {path: a.jsonl, wieght: 2}\n",
        "Error: data.train[0].wieght is not a key\n  in a.yaml:3\nhint: keys here: path, weight, repeat, limit",
    ),
    "entry without its path": (
        "data:\n  train:\n  - weight: 2\n",
        "Error: data.train[0].path is missing\n  in a.yaml:3",
    ),
    "quoted number": (
        'train: {steps: "5"}',
        "Error: train.steps is '5', expected a whole number or null\n  in a.yaml:1",
    ),
    "key is a list": ("? [a]\n: 1\n", "Error: […] is not a key\n  in a.yaml:1"),
}


@pytest.mark.parametrize(("text", "error"), YAML_ERRORS.values(), ids=YAML_ERRORS)
def test_wrong_yaml_config_gives_one_error_with_its_line(load_config_file: Any, text: str | bytes, error: str) -> None:
    message = load_config_file("a.yaml", text)
    assert error in message
    assert message.count("\n") <= 2


def test_yaml_words_mean_what_the_fields_type_says(load_config_file: Any) -> None:
    text = """
    optim: {learning_rate: 1e-4, eps: .5}
    train: {deterministic: yes, seed: 010}
    run: {name: 2024-01-01}
    data: {system_prompt: no, train: my.jsonl, eval: [1e-4]}
    target: {env: {A: 1, B: yes, C: 1:30}, gpu_ranks: ["2", 3]}
    model:
    """
    config = load_config_file("a.yaml", text)
    assert (config.optim.learning_rate, config.optim.eps) == (0.0001, 0.5)
    assert (config.train.deterministic, config.train.seed) == (True, 10)
    assert (config.run.name, config.data.system_prompt, config.data.eval) == ("2024-01-01", "no", ["1e-4"])
    assert config.data.train == ["my.jsonl"]
    assert config.target.env == {"A": "1", "B": "yes", "C": "1:30"}
    assert (config.target.gpu_ranks, config.model) == ([2, 3], ModelConfig())
