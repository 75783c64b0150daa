"""Reads the config file that `accelerate config` writes, in this schema's keys. Imports neither torch nor accelerate.

Every key is mapped, reported as without effect, or refused; none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import get_args

from trainer.config.fields import BOOL_WORDS, FLOAT_WORD, INT_WORD, NULL_WORDS, Word, show
from trainer.config.files import read_json, read_yaml
from trainer.config.fsdp1 import ACCELERATE_NAMES, STRATEGIES
from trainer.config.keys import DROPPED, Places
from trainer.errors import ConfigError, raise_all

MAX_NUMBER = 1 << 53
BACKENDS = {"FSDP": "fsdp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "NO": "pytorch"}
PRECISIONS = {"bf16": "bf16", "no": "fp32", "false": "fp32"}
"""By lower-case word, since accelerate ignores case; YAML's `no` is false there."""
BOOLS = {**BOOL_WORDS, "y": True, "t": True, "1": True, "n": False, "f": False, "0": False}


@dataclass(frozen=True)
class Setting:
    """A key of the schema, the value that the file gives it, and its place: `accelerate.yaml:7`."""

    key: str
    value: object
    place: str


@dataclass(frozen=True)
class Accelerate:
    """The content of an accelerate config file."""

    settings: tuple[Setting, ...] = ()
    num_processes: int | None = None
    """The number of processes that the file was written for; None if it has none."""
    processes_place: str = ""
    notes: tuple[str, ...] = ()
    """Lines to be shown about values without effect."""


@dataclass(frozen=True)
class Given:
    name: str
    value: object
    place: str

    @property
    def text(self) -> str:
        return self.value.text if isinstance(self.value, Word) else str(self.value)

    @property
    def is_null(self) -> bool:
        return isinstance(self.value, Word) and self.text in NULL_WORDS

    @property
    def is_empty(self) -> bool:
        """Whether it is null, an empty list or mapping, or a word for no."""
        if isinstance(self.value, Mapping | list):
            return not self.value
        return self.is_null or BOOL_WORDS.get(self.text.lower()) is False

    def error(self, problem: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{self.name} is {show(self.value)}: {problem}", where=self.place, hint=hint)

    def one_of(self, *choices: str) -> str:
        """The given choice, in any case. Raises ConfigError for another value."""
        for choice in choices:
            if self.text.upper().strip("_") == choice.upper().strip("_"):
                return choice
        near = get_close_matches(self.text.upper(), choices, n=1)
        raise self.error(f"expected one of {', '.join(choices)}", f"did you mean {near[0]}?" if near else "")

    def boolean(self) -> bool:
        value = BOOLS.get(self.text.lower())
        if value is None:
            raise self.error("expected true or false")
        return value

    def number(self) -> int:
        if INT_WORD.fullmatch(self.text):
            return int(self.text)
        number = float(self.text) if FLOAT_WORD.fullmatch(self.text) else 0.5
        if not number.is_integer() or abs(number) > MAX_NUMBER:
            raise self.error("expected a whole number")
        return int(number)

    def texts(self) -> list[str]:
        """The entries of a list, or of a text with commas."""
        if isinstance(self.value, list):
            return [v.text if isinstance(v, Word) else str(v) for v in self.value]
        return [part.strip() for part in self.text.split(",") if part.strip()]


@dataclass
class _Reading:
    """The values that were understood so far."""

    values: dict[str, tuple[object, str]] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    processes: tuple[int, str] | None = None

    def put(self, given: Given, key: str, value: object) -> None:
        self.values[key] = (value, given.place)


Rule = Callable[[Given, _Reading], None]


def read_fsdp_config(path: str | Path) -> Accelerate:
    """The content of a YAML or JSON file as `accelerate config` writes it, for FSDP versions 1 and 2.

    Raises ConfigError, with the line, for a key that accelerate does not know and for an unsupported value.
    """
    tree, places = read_json(Path(path)) if Path(path).suffix == ".json" else read_yaml(Path(path))
    reading = _Reading()
    wrong = []
    for given in _entries(tree, places):
        try:
            _read(given, reading)
        except ConfigError as error:
            wrong.append(error)
    raise_all(wrong)
    if reading.processes and reading.values.get("target.train_backend", ("", ""))[0] == "pytorch":
        reading.processes = None
        reading.notes.append("num_processes: no effect, distributed_type NO is one process")
    if reading.idle:
        reading.notes.append(f"{', '.join(reading.idle)}: no effect here, target and the launcher decide that")
    number, place = reading.processes or (None, "")
    settings = tuple(Setting(key, value, where) for key, (value, where) in reading.values.items())
    return Accelerate(settings, number, place, tuple(f"{path}: {note}" for note in reading.notes))


def _read(given: Given, reading: _Reading) -> None:
    rule = RULES.get(given.name)
    if rule is None:
        near = get_close_matches(given.name, RULES, n=1)
        hint = f"did you mean {near[0]}?" if near else "a file as `accelerate config` writes it is expected"
        raise ConfigError(f"{given.name} is not a key of accelerate's config", where=given.place, hint=hint)
    if not given.is_null or rule is _backward_prefetch:  # else it counts as not given
        rule(given, reading)


def check_processes(accelerate: Accelerate, processes: int) -> None:
    """Raise ConfigError if the file was written for a number of processes other than the config's."""
    expected = accelerate.num_processes
    if expected is not None and expected != processes:
        indices = ",".join(map(str, range(expected)))
        raise ConfigError(
            f"num_processes is {expected}, but target.gpu_ranks makes {processes} process{'es' * (processes > 1)}",
            where=accelerate.processes_place,
            hint=f"set target.gpu_ranks={indices}, or change num_processes",
        )


def _entries(tree: Mapping[str, object], places: Places) -> Iterator[Given]:
    """The entries of the top level and of fsdp_config; older files have the latter at the top level too."""
    for name, value in tree.items():
        if name in ("fsdp_config", "dynamo_config") and isinstance(value, Mapping):
            yield from (Given(inner, v, places.of(f"{name}.{inner}")) for inner, v in value.items())
        else:
            yield Given(name, value, places.of(name))


# --- rules: one for each key of accelerate ----------------------------------------------------------------------------


def _maps_bool(key: str) -> Rule:
    return lambda given, reading: reading.put(given, key, given.boolean())


def _maps_dropped(key: str) -> Rule:
    """An option of FSDP1 that is not a key here: its value is checked together with the config."""
    members = get_args(DROPPED[key].kind)
    choices = [choice for member in members for choice in get_args(member)] or members

    def rule(given: Given, reading: _Reading) -> None:
        reading.put(given, key, given.boolean() if bool in members else given.one_of(*choices))

    return rule


def _idle(given: Given, reading: _Reading) -> None:
    """Has no effect, with any value."""
    reading.idle.append(given.name)


def _only(problem: str, *allowed: str) -> Rule:
    """Refuses all values except those that change nothing."""

    def rule(given: Given, reading: _Reading) -> None:
        if not given.is_empty and given.text not in allowed:
            raise given.error(problem)

    return rule


def _distributed_type(given: Given, reading: _Reading) -> None:
    word = "NO" if given.is_empty else given.text.upper()  # YAML's NO is false
    if word not in BACKENDS:
        raise given.error("only FSDP, MULTI_GPU, MULTI_CPU and NO can be done here")
    reading.put(given, "target.train_backend", BACKENDS[word])
    if word == "MULTI_CPU":
        reading.put(given, "target.device", "cpu")


def _mixed_precision(given: Given, reading: _Reading) -> None:
    if given.text.lower() not in PRECISIONS:
        raise given.error("bf16 and no (fp32) can be done here", "bf16 has the range of fp32 and needs no loss scaling")
    reading.put(given, "train.precision", PRECISIONS[given.text.lower()])


def _num_processes(given: Given, reading: _Reading) -> None:
    if given.number() != -1:  # -1: Slurm decides it
        reading.processes = given.number(), given.place


def _gpu_ids(given: Given, reading: _Reading) -> None:
    if given.text == "all" or given.is_empty:
        _idle(given, reading)
    else:
        reading.put(given, "target.gpu_ranks", given.texts())


def _use_cpu(given: Given, reading: _Reading) -> None:
    if given.boolean():
        reading.put(given, "target.device", "cpu")


def _version(given: Given, reading: _Reading) -> None:
    if given.number() not in (1, 2):
        raise given.error("expected 1 or 2")
    if given.number() == 1:
        reading.notes.append("fsdp_version: 1, and FSDP2 runs it: the options mean what docs/config.md says")


def _strategy(given: Given, reading: _Reading) -> None:
    if given.text.isdigit() and 1 <= int(given.text) <= len(STRATEGIES):  # files of accelerate before 0.22
        reading.put(given, "parallel.sharding_strategy", list(STRATEGIES)[int(given.text) - 1])
    else:
        reading.put(given, "parallel.sharding_strategy", given.one_of(*STRATEGIES))


def _reshard(given: Given, reading: _Reading) -> None:
    """A truth value, or a strategy: `accelerate config` writes it here for version 1."""
    if given.text.lower() in BOOL_WORDS:
        reading.put(given, "parallel.reshard_after_forward", given.boolean())
    else:
        _strategy(given, reading)


def _wrap_policy(given: Given, reading: _Reading) -> None:
    word = given.one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    if word == "NO_WRAP":
        raise given.error("the whole model would be gathered at once", "use TRANSFORMER_BASED_WRAP")
    if word == "SIZE_BASED_WRAP":
        reading.put(given, "parallel.wrap_policy", "size")
    elif "parallel.wrap_classes" not in reading.values:
        reading.put(given, "parallel.wrap_policy", "transformer")


def _wrap_classes(given: Given, reading: _Reading) -> None:
    reading.put(given, "parallel.wrap_classes", given.texts())
    if reading.values.get("parallel.wrap_policy", ("transformer", ""))[0] == "transformer":
        reading.put(given, "parallel.wrap_policy", "classes")


def _backward_prefetch(given: Given, reading: _Reading) -> None:
    # FSDP1's null means no prefetch, ours meant "not given"
    _maps_dropped("parallel.backward_prefetch")(replace(given, value="NONE") if given.is_null else given, reading)


def _activation_checkpointing(given: Given, reading: _Reading) -> None:
    reading.put(given, "parallel.activation_checkpointing", "full" if given.boolean() else "none")


def _ram_efficient(given: Given, reading: _Reading) -> None:
    reading.notes.append(f"{given.name}: no effect, every rank reads only its own share of the weights")


def _ignored_modules(given: Given, reading: _Reading) -> None:
    if any(sign in "".join(given.texts()) for sign in "\\^$+(|)"):
        raise given.error("a regular expression", "set parallel.ignored_modules to patterns: model.layers.*.mlp")
    reading.put(given, "parallel.ignored_modules", [text.replace(".*", "*") for text in given.texts()])


def _dynamo(given: Given, reading: _Reading) -> None:
    word = "NO" if given.is_empty else given.text.upper()
    if word not in ("NO", "INDUCTOR"):
        raise given.error("only NO and INDUCTOR can be done here")
    reading.put(given, "parallel.compile", word == "INDUCTOR")


def _min_num_params(given: Given, reading: _Reading) -> None:
    reading.put(given, "parallel.min_num_params", given.number())


OTHER_ENGINE = _only("this trainer has FSDP2 and DDP only")
ONE_HOST = "one host is trained on; write the file with one machine"

RULES: dict[str, Rule] = {
    "compute_environment": _only("only LOCAL_MACHINE can be done here", "LOCAL_MACHINE"),
    "distributed_type": _distributed_type,
    "mixed_precision": _mixed_precision,
    "num_processes": _num_processes,
    "num_machines": _only(ONE_HOST, "1"),
    "machine_rank": _only(ONE_HOST, "0"),
    "gpu_ids": _gpu_ids,
    "use_cpu": _use_cpu,
    "fsdp_config": _only("expected a mapping of fsdp_ keys"),
    "dynamo_config": _only("expected a mapping of dynamo_ keys"),
    "dynamo_backend": _dynamo,
    "dynamo_mode": _only("only the default mode can be done here", "default"),
    "dynamo_use_dynamic": _only("shapes are static here"),
    "dynamo_use_fullgraph": _idle,
    "dynamo_use_regional_compilation": _idle,
    "deepspeed_config": OTHER_ENGINE,
    "megatron_lm_config": OTHER_ENGINE,
    "mpirun_config": OTHER_ENGINE,
    "fp16": _only("bf16 and no (fp32) can be done here"),
    "fp8_config": _only("fp8 products cannot be done here"),
    "parallelism_config": _only("set parallel.sharding_strategy and dp_replicate instead"),
    "ipex_config": OTHER_ENGINE,
    "downcast_bf16": _only("that is for TPUs"),
    "tpu_name": _only("there is no TPU backend"),
    "tpu_zone": _only("there is no TPU backend"),
    "tpu_use_cluster": _only("there is no TPU backend"),
    "tpu_use_sudo": _only("there is no TPU backend"),
    "tpu_env": _only("there is no TPU backend"),
    "tpu_vm": _only("there is no TPU backend"),
    "command_file": _only("a config says what is trained"),
    "commands": _only("a config says what is trained"),
    **dict.fromkeys(
        (
            "debug",
            "enable_cpu_affinity",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "rdzv_backend",
            "same_network",
        ),
        _idle,
    ),
    **{name: _maps_dropped(key) for name, key in ACCELERATE_NAMES.items()},
    "fsdp_version": _version,
    "fsdp_sharding_strategy": _strategy,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": _maps_bool("parallel.cpu_offload"),
    "fsdp_backward_prefetch": _backward_prefetch,
    "fsdp_backward_prefetch_policy": _backward_prefetch,
    "fsdp_forward_prefetch": _maps_bool("parallel.forward_prefetch"),
    "fsdp_auto_wrap_policy": _wrap_policy,
    "fsdp_transformer_layer_cls_to_wrap": _wrap_classes,
    "fsdp_min_num_params": _min_num_params,
    "fsdp_sync_module_states": _maps_bool("parallel.sync_module_states"),
    "fsdp_cpu_ram_efficient_loading": _ram_efficient,
    "fsdp_activation_checkpointing": _activation_checkpointing,
    "fsdp_ignored_modules": _ignored_modules,
}
