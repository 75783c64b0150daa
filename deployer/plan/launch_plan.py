"""Builds the plan of a launch, before anything is done: pure functions. The same value is printed and carried out.

What only the host knows (interpreter, folders) is a named slot in the plan; the agent fills it once and records it.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

from deployer.agent.host.layout import ATTEMPT_ENV, CACHE_ENV, JOB_ID_ENV, RUN_DIR_ENV
from deployer.agent.host.typed import load_json
from deployer.agent.job.plan import (
    PROGRAM,
    TRAINER,
    Devices,
    Group,
    Include,
    Plan,
    Policy,
    Request,
    Role,
    Setup,
    Slot,
    Text,
)
from deployer.agent.python.spec import PythonSpec
from deployer.errors import UsageError
from trainer.schema import Config, TargetConfig, gpu_count
from trainer.schema.key import facts_of

PYTHON_VARIABLE = "$PYTHON"
GPUS_VARIABLE = "$GPUS"
TRAINER_REQUIRES = (
    "torch>=2.11",
    "transformers>=4.56",
    "safetensors>=0.4.3",
    "click>=8.1",
    "pyyaml>=6.0",
)

PYTHON_RULE = "the host's interpreter that has what the job needs: --python, else found, else built from requirements"
PYTHON_HERE = "Here python3 stands for it, --dry-run=remote asks the host"
GPUS_RULE = "the host's freest GPUs: not leased, nobody computes on them, least memory in use, then lowest index"


@dataclass(frozen=True)
class Command:
    """The user's program: what follows `--` on the command line, or `script=` of a config."""

    argv: tuple[str, ...]
    torchrun: bool


@dataclass(frozen=True)
class ConfigText:
    """A trainer's config.yaml as it is sent."""

    yaml: str
    keys: frozenset[str]
    """The dotted keys in it."""
    given_alone: bool
    """The trainer that reads it may have other keys, with its own defaults; otherwise `keys` are all its keys."""


IN_SHELL = """\
d=${1%/*} shell=$2 text=$3; shift 3
[ "$(command -v python3)" = "$d/python3" ] || export PATH="$d:$PATH"
exec 9<&0
"$shell" -c "trap 'exit 143' TERM; $text" "$shell" "$@" <&9 9<&- &
trap 'trap "" TERM; kill -TERM 0' TERM
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done
exit $code"""
"""Runs the user's text in a shell whose `python` is the job's own. The text is an argument, so it reaches the shell
unchanged; the exit code is the program's. A shell that gets a signal would end without its program. So this passes the
signal on to all processes and waits until the program has saved."""


def in_shell(text: str, shell: str, arguments: Sequence[str] = ()) -> tuple[str, ...]:
    """The arguments that run a shell command."""
    return ("sh", "-c", IN_SHELL, "sh", "python", shell, text, *arguments)


# --- building ---------------------------------------------------------------------------------------------------------


def build_plan(
    config: Config,
    *,
    job_id: str,
    created: str,
    tree: str,
    own_trainer: bool,
    command: Command | None = None,
    python: PythonSpec | None = None,
    includes: Sequence[Include] = (),
    allow_busy: bool = False,
    restrict_gpus: bool = True,
    text: ConfigText | None = None,
    setup: Setup | None = None,
) -> Plan:
    """The plan of a config's job, or of `command`. `text`: the config for the trainer.

    `own_trainer`: the project has its own `train.py` and `trainer/`; otherwise those in `lib/` run.
    `restrict_gpus`: False for a program without assigned GPUs, which sees all of them.
    """
    target = config.target
    torchrun = command.torchrun if command else uses_torchrun(config)
    devices = _devices(target, restrict_gpus=restrict_gpus)
    nproc = gpu_count(target.gpu_ranks) if torchrun else 1
    role = Role(
        name=PROGRAM if command else TRAINER,
        argv=_argv(command, own_trainer=own_trainer, torchrun=torchrun, nproc=nproc),
        cwd=(Slot("job"), "/code"),
        env={**_environment(job_id, devices.kind), **({} if command else {CACHE_ENV: CACHE})},
        nodes=(devices,),
        nproc=nproc,
        torchrun=torchrun,
        max_restarts=target.max_restarts,
    )
    return Plan(
        job_id=job_id,
        name=config.run.name,
        created=created,
        roles=(role,),
        python=python or PythonSpec(),
        tree=tree,
        request=build_request(config, command, text, own_trainer=own_trainer, restrict_gpus=restrict_gpus),
        includes=tuple(includes),
        allow_busy=allow_busy,
        policy=Policy(
            queue=target.queue,
            max_runtime_s=target.max_runtime_s,
            stall_timeout_s=target.stall_timeout_s,
            log_max_bytes=int(target.log_max_gb * 1e9) or None,
            outputs=tuple(target.outputs),
            after=tuple(target.after),
            idle_timeout_s=target.idle_timeout_s,
        ),
        env_names=tuple(sorted(target.env)),
        secret_names=tuple(sorted(target.secrets)),
        config_yaml=text.yaml if text else None,
        setup=setup,
    )


def _devices(target: TargetConfig, *, restrict_gpus: bool) -> Devices:
    on_cpu = target.device == "cpu"
    if target.idle_timeout_s is not None and (on_cpu or not restrict_gpus):
        raise UsageError(
            "--idle-timeout watches the GPUs that a job is given, and this one is given none",
            hint="--stall-timeout watches its output" + ("" if on_cpu else "; --gpus gives it GPUs"),
        )
    if on_cpu:
        return Devices("cpu")
    return Devices("cuda", tuple(str(gpu) for gpu in target.gpu_ranks)) if restrict_gpus else Devices("any")


NOT_REQUESTED = ("target.ssh", "target.root", "target.env", "target.env_file", "target.after")
"""Keys that a job's request does not contain: the host, values that may be secret or their file here, and what a launch
waited for. The next attempt starts when the user requests it."""


def build_request(
    config: Config, command: Command | None, text: ConfigText | None = None, *, own_trainer: bool, restrict_gpus: bool
) -> Request:
    """The request from which the next attempt's plan is made, together with a trainer's config.yaml."""
    if command is None:
        apart = [key for key in supervised_keys() if text is not None and key not in (*text.keys, *NOT_REQUESTED)]
        given_alone = text is not None and text.given_alone
        return Request(overrides=_settings(config, apart), own_trainer=own_trainer, given_alone=given_alone)
    left_out = (*NOT_REQUESTED, *(() if restrict_gpus else ("target.gpu_ranks",)))
    own = [f"{section}.{field.name}" for section in ("run", "target") for field in fields(getattr(config, section))]
    return Request(command.argv, command.torchrun, _settings(config, [key for key in own if key not in left_out]))


def supervised_keys() -> list[str]:
    """The keys that the host carries out; the trainer ignores them."""
    return [f"target.{field.name}" for field in fields(TargetConfig) if facts_of(field).supervised]


def _settings(config: Config, keys: Sequence[str]) -> tuple[str, ...]:
    """`KEY=JSON` for each of these keys that is not at its default."""
    plain = Config()
    values = {key: (_value_of(config, key), _value_of(plain, key)) for key in keys}
    return tuple(f"{key}={json.dumps(value)}" for key, (value, default) in values.items() if value != default)


def _value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def read_settings(request: Request) -> dict[str, dict[str, Any]]:
    """The settings of a request as sections of a config. Raises InvalidData if a value is not JSON."""
    tree: dict[str, dict[str, Any]] = {}
    for setting in request.overrides:
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = load_json(value.encode("utf-8", "surrogatepass"))
    return tree


def has_auto(gpus: Sequence[str]) -> bool:
    """Whether the host chooses the GPUs (auto:N)."""
    return any(gpu.startswith("auto:") for gpu in gpus)


def uses_torchrun(config: Config) -> bool:
    """Whether the trainer of this config starts under torchrun."""
    return gpu_count(config.target.gpu_ranks) > 1 or config.target.train_backend in ("ddp", "fsdp")


def build_torchrun_argv(nproc: int, program: Sequence[Text]) -> tuple[Text, ...]:
    """The torchrun command on one node. `--standalone` chooses a free port; the supervisor does the restarts."""
    return (
        (Slot("python"),),
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={nproc}",
        "--max-restarts=0",
        (Slot("agent"), "/rank.py"),
        *program,
    )


def _argv(command: Command | None, *, own_trainer: bool, torchrun: bool, nproc: int) -> tuple[Text, ...]:
    if command is not None and not torchrun:
        return _with_python_slot(command.argv)
    if command is not None:
        return build_torchrun_argv(nproc, _program_of(command.argv))
    train = "train.py" if own_trainer else (Slot("job"), "/lib/train.py")
    program: tuple[Text, ...] = (train, (Slot("job"), "/config.yaml"))
    return build_torchrun_argv(nproc, program) if torchrun else ((Slot("python"),), "-u", *program)


_PYTHON = re.compile(r"python(3(\.\d+)?)?\Z")


def _with_python_slot(argv: tuple[str, ...]) -> tuple[Text, ...]:
    if _PYTHON.match(argv[0]):
        return ((Slot("python"),), *argv[1:])
    if argv[:4] == in_shell("", "")[:4]:
        return (*argv[:4], (Slot("python"),), *argv[5:])
    return argv


def script_of(command: Command) -> str | None:
    """The Python file that a command runs; None for `-m`, `-c` and programs that are not Python."""
    if command.torchrun:
        first = _program_of(command.argv)[0]
        return first if isinstance(first, str) and not first.startswith("-") else None
    words = iter(command.argv[1:] if _PYTHON.match(command.argv[0]) else ())
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif not word.startswith("-"):
            return word
        elif not re.fullmatch(r"-[bBdEiIOPqRsSuvx]+", word):
            return None
    return None


def _program_of(argv: tuple[str, ...]) -> tuple[Text, ...]:
    """The arguments for rank.py, from what follows `--`, which is what follows torchrun's own options: a Python file,
    `-m` and a module, or `--no-python` and any program. `python -u x.py a` and `x.py a` are the same."""
    rest = list(argv)
    if _PYTHON.match(rest[0]):
        rest.pop(0)
        while rest and rest[0] in ("-u", "-B"):
            rest.pop(0)
    word = rest[0] if rest else "-"
    if word in ("-m", "--module") and rest[1:] and not rest[1].startswith("-"):
        return ("-m", *rest[1:])
    if word == "--no-python" and rest[1:] and not rest[1].startswith("-"):
        return ("--exec", *_with_python_slot(tuple(rest[1:])))
    if word.startswith("-"):
        raise UsageError(
            f"torchrun starts a Python file, -m MODULE or --no-python PROGRAM, not `{shlex.join(argv)}`",
            hint=torchrun_hint(argv),
        )
    return tuple(rest)


def torchrun_hint(argv: Sequence[str]) -> str:
    """A hint with the launch's arguments without torchrun and torchrun's own options."""
    starts = (n for n, word in enumerate(argv) if word.endswith(".py") or word in ("-m", "--module", "--no-python"))
    own = next((n for n in starts if argv[n].endswith(".py") or argv[n + 1 :]), None)
    program = shlex.join(argv[own:]) if own is not None else "train.py ARGS"
    return f"--torchrun --gpus 0,1 -- {program}, one process for each GPU"


def _environment(job_id: str, device: str) -> dict[str, Text]:
    env: dict[str, Text] = {}
    if device != "any":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = (Slot("gpus"),) if device == "cuda" else ""
    env["PYTHONUNBUFFERED"] = "1"
    env[JOB_ID_ENV] = job_id
    env[RUN_DIR_ENV] = (Slot("job"),)
    env[ATTEMPT_ENV] = "1"
    return env


CACHE: Text = (Slot("root"), "/cache")
"""The folder in which a host's training jobs share their compiled code; `gc` knows it."""


def new_job_id(name: str, *, now: datetime | None = None) -> str:
    """A new ID that sorts by name and time: `name-1231-2359-a1b2`. Its random part makes it unique."""
    moment = now or datetime.now(timezone.utc)
    safe = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")[:48] or "job"
    return f"{safe}-{moment:%m%d-%H%M}-{secrets.token_hex(2)}"


# --- as text ----------------------------------------------------------------------------------------------


def shell_slots(group: Group, *, job_id: str, root: str, agent: str) -> dict[str, str]:
    """A group's slots as shell text, for a user who pastes the command on the host."""
    gpus = group.devices.gpus
    return {
        "python": PYTHON_VARIABLE,
        **({"gpus": GPUS_VARIABLE if has_auto(gpus) else ",".join(gpus)} if group.devices.kind == "cuda" else {}),
        "root": root,
        "job": f"{root}/jobs/{job_id}",
        "agent": f"{root}/agent/{agent}/agent",
    }


def render_command(plan: Plan, role: Role, slots: dict[str, str]) -> str:
    """A role's command as one shell line: environment, then arguments. Of --env and secrets it shows only the names."""
    words = [f"{name}={_quote(text, slots)}" for name, text in role.env.items()]
    words += [f'{name}="${name}"' for name in (*plan.env_names, *plan.secret_names)]
    words += [_quote(text, slots) for text in role.argv]
    return " ".join(words)


def render_cwd(role: Role, slots: dict[str, str]) -> str:
    return f"cd {_quote(role.cwd, slots)}"


def _quote(text: Text, slots: dict[str, str]) -> str:
    # a slot may be `$PYTHON` or begin with `~`: it stays outside the quotes, and the user's text inside
    if isinstance(text, str):
        return shlex.quote(text)
    return "".join(
        _quote_slot(slots[part.slot]) if isinstance(part, Slot) else (part if _PLAIN.match(part) else shlex.quote(part))
        for part in text
    )


_PLAIN = re.compile(r"[A-Za-z0-9_./-]*\Z")


def _quote_slot(value: str) -> str:
    head, tail = ("~/", value[2:]) if value.startswith("~/") else ("", value)
    return value if value in (PYTHON_VARIABLE, GPUS_VARIABLE) else head + (shlex.quote(tail) if tail else "")
