"""Configs: loading, overrides, types, rules, dumps. Every error is compared with the lines that a user reads."""

from __future__ import annotations

import dataclasses
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.keys import ALIASES, known_keys
from trainer.config.load import (
    ConfigError,
    check_config,
    config_from_dict,
    config_notes,
    config_to_dict,
    config_to_yaml,
    load_config,
    local_data_paths,
    num_processes,
)
from trainer.config.rules import LIMITS
from trainer.config.train import length_notes
from trainer.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TargetConfig,
    TrainConfig,
)

ROOT = Path(__file__).resolve().parent.parent
IMPORT = "from trainer.schema import *\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a config file into an empty current folder and load it; returns the Config or the rendered error."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(name: str, text: str | bytes, *overrides: str) -> Config | str:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            return load_config(name, overrides)
        except ConfigError as error:
            return error.render()

    return write_and_load


def override(*overrides: str) -> Config | str:
    try:
        return load_config(ROOT / "configs/02_debug_sft_fsdp.py", overrides)
    except ConfigError as error:
        return error.render()


def error_of(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    return caught.value.render()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_error_with_place_and_hint_renders_three_lines() -> None:
    error = ConfigError("train.x is not a key", where="a.yaml:14", hint="did you mean train.y?")
    assert error.render() == "Error: train.x is not a key\n  in a.yaml:14\nhint: did you mean train.y?"
    assert error.exit_code == 2


def test_error_without_place_and_hint_renders_one_line() -> None:
    assert ConfigError("no config").render() == "Error: no config"


# --- startup ----------------------------------------------------------------------------------------------------------


def test_import_loads_neither_torch_nor_yaml_nor_deployer() -> None:
    code = (
        "import sys; sys.path.insert(0, ''); from trainer.config.load import load_config;"
        "load_config('configs/02_debug_sft_fsdp.py', ['target.gpu_ranks=0,1', 'optim.learning_rate=1e-4']);"
        "print([m for m in ('torch', 'yaml', 'deployer', 'numpy', 'click') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- the shipped configs ----------------------------------------------------------------------------------------------


def test_debug_config_is_one_process_on_a_device_chosen_by_the_host() -> None:
    config = load_config(ROOT / "configs/01_debug_sft.py")
    assert (num_processes(config), config.target.device) == (1, "auto")
    assert local_data_paths(config, root=ROOT) == []


def test_fsdp_config_names_four_gpus() -> None:
    config = load_config(ROOT / "configs/02_debug_sft_fsdp.py")
    assert config.target.gpu_ranks == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["01_debug_sft.py", "02_debug_sft_fsdp.py"])
def test_shipped_config_takes_the_overrides_its_docstring_names(name: str) -> None:
    path = ROOT / "configs" / name
    words = ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "data.train=my.jsonl", "optim.learning_rate=1e-5"]
    assert all(word in path.read_text() for word in words)
    config = load_config(path, words)
    assert (config.model.name, config.data.train) == ("Qwen/Qwen2.5-0.5B-Instruct", ["my.jsonl"])
    assert config_notes(config, backend="fsdp", deployed=True) == []


def test_pretraining_config_takes_the_overrides_its_docstring_names() -> None:
    path = ROOT / "configs/03_debug_pretrain.py"
    words = ["data.train=corpus.tokens", "data.tokenizer=Qwen/Qwen3-0.6B"]
    assert all(word in path.read_text() for word in words)
    config = load_config(path, words)
    assert (config.recipe, config.data.train) == ("pretrain", ["corpus.tokens"])
    assert config_notes(config, backend="pytorch", deployed=True) == []


# --- files ------------------------------------------------------------------------------------------------------------


def test_missing_file_names_the_nearest_one(load: Any) -> None:
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
def test_file_that_is_no_config_gives_one_error(load: Any, name: str, text: str, error: str) -> None:
    assert load(name, text) == error


def test_python_file_that_binds_no_config_is_not_run(load: Any) -> None:
    program = "open('ran', 'w')\ndef main():\n    config = 1\nnames = [config for config in 'ab']\n"
    assert load("a.py", program).endswith("for a program of your own: deploy.py run -- python FILE")
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
def test_python_config_may_bind_its_name_in_any_way(load: Any, binding: str) -> None:
    Path("helper.py").write_text(IMPORT + "config = made = Config()\n")
    assert load("a.py", f"{IMPORT}made = Config()\n{binding}\n") == Config()


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
def test_wrong_python_config_gives_one_error_with_its_line(load: Any, text: str, error: str) -> None:
    message = load("a.py", text)
    assert message.startswith(error)
    assert message.count("\n") <= 2


def test_python_config_imports_from_its_own_folder_and_leaves_no_trace(load: Any, tmp_path: Path) -> None:
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


def test_syntax_error_in_an_imported_module_names_that_file(load: Any, tmp_path: Path) -> None:
    Path("broken_helper.py").write_text("ok = 1\nx = = 2\n")
    message = load("a.py", "import broken_helper as config\n")
    assert message.splitlines()[1] == f"  in {tmp_path / 'broken_helper.py'}:2"


def test_what_a_config_prints_goes_to_stderr(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("a.py", IMPORT + "print('hello')\nconfig = Config()\n")
    assert capsys.readouterr() == ("", "hello\n")


def test_python_values_of_equal_meaning_become_the_fields_type(load: Any) -> None:
    config = load(
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
    "two documents": ("run: {}\n---\nrun: {}\n", "Error: not valid YAML: but found another document\n  in a.yaml:2"),
    "tag": (
        "run: !!python/object/apply:os.system [ls]\n",
        "Error: run has the YAML tag tag:yaml.org,2002:python/object/apply:os.system, which is not allowed\n"
        "  in a.yaml:1",
    ),
    "endless alias": ("data:\n  train: &a [*a]\n", "is nested too deeply\n  in a.yaml:2"),
    "section is a scalar": ("train: 5\n", "Error: train is 5, expected a TrainConfig (a section with keys of its own)"),
    "words for a list": (
        "args: --lr 3\n",
        "Error: args is --lr 3, expected a list, each text\n  in a.yaml:1\nhint: write it as a list: [--lr, 3]",
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
def test_wrong_yaml_config_gives_one_error_with_its_line(load: Any, text: str | bytes, error: str) -> None:
    message = load("a.yaml", text)
    assert error in message
    assert message.count("\n") <= 2


def test_yaml_words_mean_what_the_fields_type_says(load: Any) -> None:
    text = """
    optim: {learning_rate: 1e-4, eps: .5}
    train: {deterministic: yes, seed: 010}
    run: {name: 2024-01-01}
    data: {system_prompt: no, train: my.jsonl, eval: [1e-4]}
    target: {env: {A: 1, B: yes, C: 1:30}, gpu_ranks: ["2", 3]}
    model:
    """
    config = load("a.yaml", text)
    assert (config.optim.learning_rate, config.optim.eps) == (0.0001, 0.5)
    assert (config.train.deterministic, config.train.seed) == (True, 10)
    assert (config.run.name, config.data.system_prompt, config.data.eval) == ("2024-01-01", "no", ["1e-4"])
    assert config.data.train == ["my.jsonl"]
    assert config.target.env == {"A": "1", "B": "yes", "C": "1:30"}
    assert (config.target.gpu_ranks, config.model) == ([2, 3], ModelConfig())


# --- overrides --------------------------------------------------------------------------------------------------------

OVERRIDES = [
    ("train.steps=50", 50),
    ("train.stop_after_steps= 7 ", 7),
    ("optim.learning_rate=1e-4", 0.0001),
    ("optim.learning_rate=1", 1.0),
    ("optim.weight_decay=.1", 0.1),
    ("target.gpu_ranks=[2,0]", [2, 0]),
    ("data.eval=", []),
    ("data.train=my.jsonl", ["my.jsonl"]),
    ("data.train=a.jsonl, b.jsonl", ["a.jsonl", "b.jsonl"]),
    ("data.train=['a,b.jsonl']", ["a,b.jsonl"]),
    ("data.train='a,b.jsonl'", ["a,b.jsonl"]),
    ("data.train=~/x=1/y.jsonl", ["~/x=1/y.jsonl"]),
    ("model.name=null", None),
    ("model.name=", None),
    ("model.name=123", "123"),
    ("data.system_prompt=You are: #1", "You are: #1"),
    ("data.system_prompt='null'", "null"),
    ("train.deterministic=true", True),
    ("train.deterministic=off", False),
    ("target.train_backend=ddp", "ddp"),
    ("target.env={A: 1, B: x y}", {"A": "1", "B": "x y"}),
    ("target.env.A=1=2", {"A": "1=2"}),
    ("target.env.A=", {"A": ""}),
    ("files=data/a,data/b", ["data/a", "data/b"]),
]


@pytest.mark.parametrize(("text", "value"), OVERRIDES)
def test_override_becomes_the_fields_type(text: str, value: object) -> None:
    config: Any = override(text)
    for name in text.partition("=")[0].removesuffix(".A").split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


def test_later_override_of_a_key_wins_and_variables_add_up() -> None:
    config = override("target.env.A=1", "target.env.B=2", "target.env.A=3", "run.name=a", "run.name=b")
    assert isinstance(config, Config)
    assert (config.target.env, config.run.name) == ({"A": "3", "B": "2"}, "b")


def test_gpu_ranks_take_a_number_of_gpus_to_choose() -> None:
    config = override("target.gpu_ranks=auto:2")
    assert isinstance(config, Config)
    assert (config.target.gpu_ranks, num_processes(config)) == (["auto:2"], 2)


def test_gpu_ranks_take_commas_and_uuids() -> None:
    config = override("target.gpu_ranks=GPU-8932f937-d72c,MIG-11112222")
    assert isinstance(config, Config)
    assert config.target.gpu_ranks == ["GPU-8932f937-d72c", "MIG-11112222"]


UNKNOWN = "is not a key\n  on the command line\nhint: did you mean"
OVERRIDE_ERRORS = [
    ("train", "Error: 'train' is not an override\n  on the command line\nhint: write KEY=VALUE: train.steps=50"),
    ("train.learning_rate=1e-4", f"Error: train.learning_rate {UNKNOWN} optim.learning_rate?"),
    ("learning_rate=1e-4", f"Error: learning_rate {UNKNOWN} optim.learning_rate?"),
    ("lr=1e-4", f"Error: lr {UNKNOWN} optim.learning_rate?"),
    ("trian.step=4", f"Error: trian.step {UNKNOWN} train.steps?"),
    ("name=x", f"Error: name {UNKNOWN} model.name or run.name?"),
    (
        "target.zzz=1",
        "Error: target.zzz is not a key\n  on the command line\n"
        "hint: keys of target: gpu_ranks, train_backend, device, ssh, python, root, env, secrets",
    ),
    (
        "zzz=1",
        "Error: zzz is not a key\n  on the command line\nhint: sections: target, model, lora, data, optim, train, par",
    ),
    (
        "run=x",
        "Error: run is a section, not a key\n  on the command line\nhint: keys of run: name, dir, export",
    ),
    ("=5", "Error: '=5' is not an override\n  on the command line\nhint: write KEY=VALUE: train.steps=50"),
    ("train.steps=many", "Error: train.steps is many, expected a whole number or null\n  on the command line"),
    ("train.steps=1.5", "Error: train.steps is 1.5, expected a whole number or null\n  on the command line"),
    ("train.steps=0x10", "Error: train.steps is 0x10, expected a whole number or null\n  on the command line"),
    ("train.seed=true", "Error: train.seed is true, expected a whole number\n  on the command line"),
    ("train.seed=", "Error: train.seed is empty, expected a whole number\n  on the command line"),
    ("train.seed=" + "9" * 90, f"Error: train.seed is {'9' * 77}…, expected a whole number\n  on the command line"),
    ("train.deterministic=1", "Error: train.deterministic is 1, expected true or false\n  on the command line"),
    ("optim.eps=nan", "Error: optim.eps is nan, expected a number\n  on the command line"),
    ("optim.eps=1e999", "Error: optim.eps is 1e999, expected a number\n  on the command line"),
    (
        "target.train_backend=FDSP",
        "Error: target.train_backend is FDSP, expected one of auto, pytorch, ddp, fsdp\n  on the command line\n"
        "hint: did you mean fsdp?",
    ),
    (
        "run.name=null",
        "Error: run.name is null, expected text\n  on the command line\n"
        'hint: put it in quotes if you mean the text: "null"',
    ),
    (
        "data.train=[a, [b]]",
        "Error: data.train[1] is [b], expected text or a mapping of path, weight, repeat, limit\n  on the command line",
    ),
    ("data.train=[a", "Error: not valid YAML: expected ',' or ']', but got '<stream end>'\n  on the command line"),
    ("target.env=5", "Error: target.env is 5, expected a mapping of names to text\n  on the command line"),
    (
        "target.env.A=a\0b",
        "Error: target.env.A is a\0b, expected text without NUL and of valid UTF-8\n  on the command",
    ),
    ("target.gpu_ranks=0,0", "Error: target.gpu_ranks is [0, 0], it names 0 twice\n  on the command line\nhint: one"),
    (
        "optim.warmup_steps=500",
        "Error: optim.warmup_steps is 500, more than train.steps, 60\n  on the command line\n"
        "hint: set optim.warmup_steps=6",
    ),
]


@pytest.mark.parametrize(("text", "error"), OVERRIDE_ERRORS)
def test_wrong_override_gives_one_error(text: str, error: str) -> None:
    message = override(text)
    assert isinstance(message, str)
    assert message.startswith(error)


def test_every_alias_names_a_known_key_and_is_none_itself() -> None:
    leaves = {key.rpartition(".")[2] for key in known_keys()}
    assert set(ALIASES.values()) <= set(known_keys())
    assert not leaves & set(ALIASES)


# --- steps or epochs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "steps", "epochs"),
    [
        ("train: {epochs: 2}", [], None, 2.0),
        ("train: {steps: 30}", [], 30, None),
        ("train: {steps: 30}", ["train.epochs=2"], None, 2.0),
        ("train: {epochs: 2}", ["train.steps=30"], 30, None),
        ("train: {steps: null, epochs: 0.5}", [], None, 0.5),
        ("train: {steps: 30}", ["train.epochs=null"], 30, None),
        ("train: {steps: 30}", ["train.epochs=2", "train.steps=null"], None, 2.0),
    ],
)
def test_giving_one_of_steps_and_epochs_drops_the_other(
    load: Any, text: str, overrides: list[str], steps: int | None, epochs: float | None
) -> None:
    config = load("a.yaml", text, *overrides)
    assert (config.train.steps, config.train.epochs) == (steps, epochs)


def test_steps_and_epochs_from_one_source_are_an_error(load: Any) -> None:
    first = "Error: train.steps is 30 and train.epochs is 2: only one may say how long to train\n"
    assert load("a.yaml", "train:\n  steps: 30\n  epochs: 2\n").startswith(f"{first}  in a.yaml:3\n")
    assert load("a.yaml", "run: {}", "train.steps=30", "train.epochs=2").startswith(f"{first}  on the command line\n")


# --- rules ------------------------------------------------------------------------------------------------------------


def target(**values: Any) -> Config:
    return Config(target=TargetConfig(**values))


def train(ranks: int = 1, **values: Any) -> Config:
    return Config(train=TrainConfig(**values), target=TargetConfig(gpu_ranks=list(range(ranks))))


NAME_RULE = "it may hold only letters, digits, '.', '_' and '-', at most 100, not starting with '.' or '-'"
RULES = [
    (target(gpu_ranks=[]), "target.gpu_ranks is empty\nhint: name one GPU index for each process; with target.device"),
    (target(gpu_ranks=[0, 1, 0]), "target.gpu_ranks is [0, 1, 0], it names 0 twice\nhint: one process for each GPU"),
    (target(gpu_ranks=[1, "01"]), "target.gpu_ranks is [1, '01'], it names 01 twice"),
    (
        target(gpu_ranks=["GPU-ABCD", "GPU-abcd"]),
        "target.gpu_ranks is ['GPU-ABCD', 'GPU-abcd'], it names GPU-abcd twice",
    ),
    (target(gpu_ranks=[0, -1]), "target.gpu_ranks holds -1, a GPU index is 0 or more"),
    (target(gpu_ranks=["-2"]), "target.gpu_ranks holds -2, a GPU index is 0 or more"),
    (
        target(gpu_ranks=["cuda:0"]),
        "target.gpu_ranks holds 'cuda:0', expected an index such as 0 or a UUID such as GPU-8932f937-…",
    ),
    (target(gpu_ranks=["auto:0"]), "target.gpu_ranks holds 'auto:0', not a number of GPUs"),
    (target(gpu_ranks=["auto"]), "target.gpu_ranks holds 'auto', not a number of GPUs"),
    (target(gpu_ranks=["auto:2", 1]), "target.gpu_ranks is ['auto:2', 1], auto:N stands alone"),
    (
        target(gpu_ranks=["auto:2"], train_backend="pytorch"),
        "target.train_backend is pytorch, one process, but target.gpu_ranks names 2 GPUs: ['auto:2']",
    ),
    (
        target(gpu_ranks=["GPU-8932f937", 1]),
        "target.gpu_ranks is ['GPU-8932f937', 1], CUDA takes indices or UUIDs, not both",
    ),
    (
        target(gpu_ranks=[0, 1], train_backend="pytorch"),
        "target.train_backend is pytorch, one process, but target.gpu_ranks names 2 GPUs: [0, 1]\nhint: use ddp",
    ),
    (target(env={"A-B": "1"}), "target.env holds 'A-B', not a name of an environment variable"),
    (target(env={"1A": "1"}), "target.env holds '1A', not a name of an environment variable"),
    (target(secrets=["A=b"]), "target.secrets holds 'A=b', not a name of an environment variable\nhint: a secret is"),
    (target(secrets=["T"], env={"T": "x"}), "T is in both target.env and target.secrets\nhint: keep one of them"),
    (target(secrets=["T", "T"]), "target.secrets names T twice"),
    (
        target(env={"CUDA_VISIBLE_DEVICES": "1"}),
        "target.env may not set CUDA_VISIBLE_DEVICES: target.gpu_ranks says which GPUs the job sees",
    ),
    (target(env={"RANK": "1"}), "target.env may not set RANK: torchrun sets it for every process"),
    (target(secrets=["TORCHFERRY_RUN_DIR"]), "target.secrets may not set TORCHFERRY_RUN_DIR: it is the launcher's own"),
    (target(ssh="-oProxyCommand=x"), "target.ssh is '-oProxyCommand=x', it may not start with '-'"),
    (target(ssh=""), "target.ssh is empty"),
    (Config(run=RunConfig(name="../x")), f"run.name is '../x', {NAME_RULE}"),
    (Config(run=RunConfig(name="-x")), f"run.name is '-x', {NAME_RULE}"),
    (Config(run=RunConfig(name=".x")), f"run.name is '.x', {NAME_RULE}"),
    (Config(run=RunConfig(name="a b")), f"run.name is 'a b', {NAME_RULE}"),
    (Config(run=RunConfig(name="x\n")), f"run.name is 'x\\n', {NAME_RULE}"),
    (Config(data=DataConfig(train=[])), "data.train is empty\nhint: name a JSONL or Parquet file or a dataset"),
    (Config(data=DataConfig(train=["a", " "])), "data.train[1] is empty"),
    (Config(data=DataConfig(seq_len=1)), "data.seq_len is 1, must be 2 or more"),
    (Config(data=DataConfig(seq_len=8192)), "data.seq_len is 8192, more than model.max_position_embeddings, 4096"),
    (Config(data=DataConfig(eval_fraction=1.0)), "data.eval_fraction is 1.0, must be 0 or more and less than 1"),
    (Config(model=ModelConfig(init="pretrained")), "model.init is pretrained, but model.name is null\nhint: set model"),
    (
        Config(model=ModelConfig(hidden_size=100, num_heads=3, num_kv_heads=3)),
        "model.hidden_size is 100, not a multiple of model.num_heads, 3\nhint: change one of them or set model",
    ),
    (
        Config(model=ModelConfig(hidden_size=12, num_heads=4)),
        "model.hidden_size 12 / model.num_heads 4 = 3 per head, must be an even number of 2 or more",
    ),
    (Config(model=ModelConfig(head_dim=7)), "model.head_dim is 7, must be an even number of 2 or more"),
    (
        Config(model=ModelConfig(num_heads=4, num_kv_heads=3)),
        "model.num_heads is 4, not a multiple of model.num_kv_heads, 3",
    ),
    (Config(model=ModelConfig(num_layers=0)), "model.num_layers is 0, must be 1 or more"),
    (train(steps=None), "neither train.steps nor train.epochs is given\nhint: set one of them"),
    (train(steps=None, epochs=0.0), "train.epochs is 0.0, must be more than 0"),
    (train(steps=0), "train.steps is 0, must be 1 or more"),
    (train(micro_batch_size=-4), "train.micro_batch_size is -4, must be 1 or more"),
    (train(seed=2**32), "train.seed is 4294967296, must be 0 to 4294967295"),
    (
        train(4, global_batch_size=3),
        "train.global_batch_size is 3, less than one row for each of 4 processes\nhint: make it 4 or more",
    ),
    (
        train(2, global_batch_size=64, micro_batch_size=4, grad_accum_steps=2),
        "train.global_batch_size is 64, but micro_batch_size 4 x grad_accum_steps 2 x 2 processes = 16\nhint: set only",
    ),
    (
        Config(train=TrainConfig(micro_batch_tokens=4096, global_batch_size=8)),
        "train.micro_batch_tokens is 4096, but with data.packing every row has data.seq_len tokens, 512\nhint: set "
        "train.micro_batch_size=8 instead",
    ),
    (
        Config(train=TrainConfig(micro_batch_tokens=500, global_batch_size=8), data=DataConfig(packing=False)),
        "train.micro_batch_tokens is 500, less than one row of data.seq_len tokens, 512",
    ),
    (
        Config(train=TrainConfig(micro_batch_tokens=512), data=DataConfig(packing=False)),
        "train.micro_batch_tokens is 512, but train.global_batch_size is null: nothing says how many rows a step has",
    ),
    (
        Config(
            train=TrainConfig(micro_batch_tokens=512, global_batch_size=8, grad_accum_steps=2),
            data=DataConfig(packing=False),
        ),
        "train.grad_accum_steps is 2, but with train.micro_batch_tokens the tokens decide that",
    ),
    (
        Config(optim=OptimConfig(min_learning_rate=0.01)),
        "optim.min_learning_rate is 0.01, more than learning_rate, 0.001",
    ),
    (
        Config(optim=OptimConfig(decay_steps=5)),
        "optim.decay_steps is 5, but optim.schedule is cosine; only wsd has a decay of its own\nhint: drop decay_steps",
    ),
    (
        Config(optim=OptimConfig(schedule="wsd", decay_steps=195)),
        "optim.warmup_steps 10 + decay_steps 195 = 205, more than train.steps, 200",
    ),
    (
        Config(optim=OptimConfig(warmup_steps=201)),
        "optim.warmup_steps is 201, more than train.steps, 200\nhint: set optim.warmup_steps=20",
    ),
    (Config(optim=OptimConfig(beta2=1.0)), "optim.beta2 is 1.0, must be 0 or more and less than 1"),
    (Config(args=["--x"]), "args is ['--x'], but there is no script to take them\nhint: set script"),
    (Config(torchrun=False), "torchrun is false, which needs a script: the trainer has its own launcher"),
    (
        Config(script="a.py", train=TrainConfig(steps=5), model=ModelConfig(name="x")),
        "script is 'a.py', so the trainer does not run, but it is configured in: model, train\nhint: pass a script",
    ),
    (
        Config(script="a.py", target=TargetConfig(train_backend="fsdp")),
        "target.train_backend is fsdp, but script 'a.py' decides that\nhint: drop it",
    ),
]


@pytest.mark.parametrize(("config", "error"), RULES, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_broken_rule_is_named_with_its_numbers(config: Config, error: str) -> None:
    assert error_of(config).startswith(f"Error: {error}")


VALID = [
    Config(),
    target(gpu_ranks=[3], train_backend="ddp"),
    target(gpu_ranks=[0], train_backend="fsdp"),
    target(gpu_ranks=[0, 1], env={"_A1": ""}, secrets=["HF_TOKEN"]),
    train(2, global_batch_size=16, micro_batch_size=4, grad_accum_steps=2),
    train(2, global_batch_size=3),
    train(steps=10),
    train(steps=None, epochs=0.1),
    Config(model=ModelConfig(name="x", hidden_size=100, num_heads=3), data=DataConfig(seq_len=100_000)),
    Config(model=ModelConfig(hidden_size=100, num_heads=3, num_kv_heads=1, head_dim=32)),
    Config(optim=OptimConfig(schedule="wsd", decay_steps=190)),
    Config(script="a.py", args=["--x", ""], target=TargetConfig(gpu_ranks=[0, 1]), torchrun=False),
    Config(run=RunConfig(name="1.0_a-b")),
]


@pytest.mark.parametrize("config", VALID, ids=range(len(VALID)))
def test_config_at_the_edge_of_the_rules_is_accepted(config: Config) -> None:
    check_config(config)


def test_every_number_of_the_schema_has_a_limit() -> None:
    numbers = {key for key, kind in known_keys().items() if {int, float} & {kind, *getattr(kind, "__args__", ())}}
    assert numbers == set(LIMITS)


def test_rule_names_the_line_of_its_key(load: Any) -> None:
    message = load("a.yaml", "target:\n  gpu_ranks:\n  - 0\n  - 0\n")
    assert message.splitlines()[:2] == ["Error: target.gpu_ranks is [0, 0], it names 0 twice", "  in a.yaml:2"]


# --- helpers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "processes"),
    [
        (Config(), 1),
        (target(gpu_ranks=[4, 5]), 2),
        (Config(script="a.py", target=TargetConfig(gpu_ranks=[0, 1])), 2),
        (Config(script="a.py", torchrun=False, target=TargetConfig(gpu_ranks=[0, 1])), 1),
    ],
)
def test_number_of_processes_follows_from_gpu_ranks(config: Config, processes: int) -> None:
    assert num_processes(config) == processes


def test_local_paths_are_told_from_hub_names(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    train_data = ["builtin:stdlib-docs", "HuggingFaceH4/no_robots", "a.jsonl", "rows", "./x", "~/y", "a.jsonl"]
    config = Config(
        data=DataConfig(train=train_data, eval=["hf://d/x.parquet", "e.parquet"], chat_template="chat.jinja"),
        model=ModelConfig(name="../m"),
    )
    found = ["a.jsonl", "rows", "./x", "~/y", "e.parquet", "../m", "chat.jinja"]
    assert local_data_paths(config, root=tmp_path) == found


def test_micro_batch_size_beside_a_token_budget_is_noted() -> None:
    train = TrainConfig(micro_batch_tokens=512, global_batch_size=8, micro_batch_size=2)
    config = Config(train=train, data=DataConfig(packing=False))
    [note] = config_notes(config, backend="ddp", deployed=True)
    assert note.startswith("train.micro_batch_size: no effect, train.micro_batch_tokens decides")


def test_keys_without_effect_are_noted() -> None:
    config = Config(
        target=TargetConfig(ssh="gpu", root="/data"),
        model=ModelConfig(name="gpt", num_layers=9),
        data=DataConfig(train=["a.jsonl", "some/rows"], train_split="validation", eval_split="dev", eval=["b.parquet"]),
        parallel=ParallelConfig(reshard_after_forward=False, reduce_dtype="bf16"),
    )
    assert config_notes(config, backend="pytorch", deployed=False) == [
        "model.num_layers: no effect, gpt brings its own shape",
        "data.eval_split: no effect, data.eval names no Hugging Face data set",
        "parallel.reshard_after_forward, parallel.reduce_dtype: no effect with pytorch",
        "target.ssh, target.root: no effect, train.py runs here and under this Python",
    ]
    assert len(config_notes(config, backend="ddp", deployed=True)) == 3
    assert config_notes(Config(), backend="pytorch", deployed=False) == []


# --- dumps ------------------------------------------------------------------------------------------------------------


def test_dump_has_every_key_in_the_schemas_order_with_lists_on_one_line() -> None:
    text = config_to_yaml(target(gpu_ranks=[0, 1], env={"A": "1"}))
    values = yaml.safe_load(text)
    assert [k for k in values if not isinstance(values[k], dict)] == ["recipe", "files", "script", "args", "torchrun"]
    dumped = {f"{k}.{leaf}" for k, v in values.items() if isinstance(v, dict) for leaf in v}
    assert dumped == {key for key in known_keys() if "." in key}
    assert text.startswith(
        "recipe: sft\ntarget:\n  gpu_ranks: [0, 1]\n  train_backend: auto\n  device: auto\n  ssh: null\n"
    )
    assert "  env:\n    A: '1'\n" in text


def test_dict_with_a_wrong_value_names_where_it_came_from() -> None:
    values = config_to_dict(Config())
    values["train"]["steps"] = "50"
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values, "job.json")
    assert caught.value.render() == "Error: train.steps is '50', expected a whole number or null\n  in job.json"


# Every text that a file can hold: no lone surrogates, no NUL.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
named = texts.filter(lambda text: bool(text.strip()))
names = st.text(string.ascii_letters + "_", min_size=1, max_size=8).map(lambda name: f"X_{name}")
positive = st.floats(1e-12, 1e12)
configs = st.builds(
    Config,
    target=st.builds(
        TargetConfig,
        gpu_ranks=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
        train_backend=st.sampled_from(["auto", "ddp", "fsdp"]),
        root=named,
        env=st.dictionaries(names, texts, max_size=3),
    ),
    model=st.builds(ModelConfig, name=st.none() | named, rms_norm_eps=positive, tie_embeddings=st.booleans()),
    data=st.builds(DataConfig, train=st.lists(named, min_size=1, max_size=3), system_prompt=st.none() | texts),
    optim=st.builds(OptimConfig, learning_rate=positive, weight_decay=positive),
    train=st.one_of(
        st.builds(TrainConfig, steps=st.integers(10, 10**9), seed=st.integers(0, 2**32 - 1)),
        st.builds(TrainConfig, steps=st.none(), epochs=positive),
    ),
    files=st.lists(named, max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(config=configs)
def test_any_config_survives_its_dump(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.getbasetemp() / "dump.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8", newline="")
    assert load_config(path) == config
    assert config_from_dict(config_to_dict(config)) == config


def test_dump_of_words_that_yaml_would_read_as_something_else_loads_back(tmp_path: Path) -> None:
    words = ["null", "~", "1e-4", "yes", "010", "1:30", "2024-01-01", "[a]", "- a", "a: b", "#x", "é…", " x ", "'"]
    words += ["a\nb", "0\x85", "x\u2028", "a\t"]
    config = Config(data=dataclasses.replace(Config().data, train=words), run=RunConfig(name="1e-4"))
    (tmp_path / "a.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "a.yaml") == config


@pytest.mark.parametrize(
    ("values", "backend", "note"),
    [
        ({"data": {"eval_fraction": 0.0}, "train": {"eval_every": 7}}, "fsdp", "train.eval_every: no effect, there is"),
        ({"data": {"schema": "messages"}}, "fsdp", "data.schema: no effect, the built-in text has"),
        ({"train": {"debug_distributed": "info"}}, "pytorch", "train.debug_distributed: no effect with one process"),
        ({"run": {"dir": "there"}}, "fsdp", "run.dir: no effect, a deployed job"),
        ({"data": {"eval": ["a.jsonl"], "eval_fraction": 0.5}}, "fsdp", "data.eval_fraction: no effect, data.eval"),
    ],
)
def test_key_without_effect_in_a_setting_is_noted(values: dict[str, object], backend: str, note: str) -> None:
    assert [
        line.startswith(note) for line in config_notes(config_from_dict(values), backend=backend, deployed=True)
    ] == [True]


def test_share_of_the_built_in_text_counts_where_its_held_out_modules_are_evaluated() -> None:
    config = config_from_dict({"data": {"eval": ["builtin:stdlib-docs"], "eval_fraction": 0.5}})
    assert config_notes(config, backend="fsdp", deployed=True) == []


@pytest.mark.parametrize(("key", "value"), [("recipe", "pretrain"), ("run", {"export": False})])
def test_trainers_keys_beside_a_script_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"the trainer does not run, but it is configured in: {key}"):
        config_from_dict({"script": "x.py", key: value})


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (
            {"optim": {"warmup_steps": 9}},
            "optim.warmup_steps is 9, more than the run's 5: the learning rate never peaks",
        ),
        ({"optim": {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 4}}, "optim.warmup_steps + decay_steps is 6,"),
        ({"train": {"profile_steps": [1, 6]}}, "a step of train.profile_steps is 6, more than the run's 5: nothing is"),
        ({"train": {"stop_after_steps": 6}}, "train.stop_after_steps is 6, more than the run's 5: it ends before"),
        ({"train": {"stop_after_steps": 5}}, ""),
    ],
)
def test_key_beyond_the_length_that_epochs_give_is_noted(values: dict[str, dict[str, object]], note: str) -> None:
    train = {"steps": None, "epochs": 1.0, **values.get("train", {})}
    notes = length_notes(config_from_dict({"optim": {"warmup_steps": 0}, **values, "train": train}), 5)
    assert [line.startswith(note) for line in notes] == ([True] if note else [])
