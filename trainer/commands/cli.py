"""The command line of `train.py`. Only the process that trains imports torch, and each command is imported when
called."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import click

import trainer
from trainer.commands.help import CONTEXT, TRAIN, TRAINING, VERBS
from trainer.commands.interruptible import interruptible
from trainer.commands.take_place import take_place, world_of
from trainer.commands.usage import in_two_parts
from trainer.config.kinds.recognise import CONFIG, expect, read_kind
from trainer.config.load import ConfigError, load_config, num_processes
from trainer.console import shown, tame_others, write_error, write_json, write_line
from trainer.errors import UserError
from trainer.host_memory import available_cores
from trainer.run_folder import IN_USE_HINT, PATIENCE_S, acquire_run_folder, release_all
from trainer.schema import CONFIG_FILE, JOB_ID_ENV, RUN_DIR_ENV, STOP_FILE, Config
from trainer.start import by_hand, caches, launch
from trainer.start.by_hand import PROGRAM_ENV
from trainer.start.place import Alone, Node, Place, Rank, is_other_rank, render_place
from trainer.startup import Startup

COMMANDS = {
    "init": ("trainer.commands.init:init", "init KIND", "Write a short file to start from."),
    "convert": ("trainer.commands.convert:convert", "convert FILE", "Convert a SkyPilot or dstack task."),
    "keys": ("trainer.commands.keys:keys", "keys [WORD]...", "Show the keys of a config."),
    "export": ("trainer.commands.export:export", "export RUN", "Write a Hugging Face folder."),
    "generate": ("trainer.commands.generate:generate", "generate MODEL TEXT...", "Generate text with a model."),
    "tokenize": ("trainer.commands.tokenize:tokenize", "tokenize SOURCE...", "Write a token file."),
}
"""By first word: the path of its click command, which is imported when called; its usage; its description."""
WITHOUT_TORCH = ("init", "convert", "keys")
MOST_CARD_GIB = 4096
UTF8_MODE_ENV = "PYTHONUTF8"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train, or run another command, and exit with an exit code. A user's mistake is printed as one paragraph."""
    if argv is None:
        read_names_as_utf8()
    words = list(sys.argv[1:] if argv is None else argv)
    program = os.environ.pop(PROGRAM_ENV, "") or Path(sys.argv[0]).name
    tame_others()
    try:
        if words and words[0] in COMMANDS:
            if words[0] not in WITHOUT_TORCH and not {"-h", "--help"} & set(words):
                check_torch()
            run_command(load_command(words[0]), words[1:], f"{program} {words[0]}")
        else:
            run_command(train_command, words, program)
    except UserError as error:
        if "--debug" in words:
            raise
        if is_other_rank(os.environ):
            launch.let_rank_0_tell()  # every rank of a torchrun started by hand reads the same config
        write_error(error.render())
        if "--json" in words:
            with suppress(OSError):  # the exit code is enough
                write_json({"error": error.as_json()})
        sys.exit(error.exit_code)
    except OSError as error:  # of a named file, else of the output
        if "--debug" in words:
            raise
        sys.stdout = None  # Python would try to write again at exit, and print a traceback
        file = f"{shown(os.fsdecode(error.filename))}: " if isinstance(error.filename, (str, bytes)) else ""
        write_error(f"Error: {program}: {file}{error.strerror or error}")
        sys.exit(1)
    raise AssertionError("click leaves by itself")


def run_command(command: click.Command, words: Sequence[str], program: str) -> NoReturn:
    """Exit with the command's exit code. Raises UserError for a mistake in the words, as for any other mistake."""
    try:
        code = command.main(words, program, standalone_mode=False)
    except click.ClickException as error:
        typed = f"python {program}" if program.partition(" ")[0] == "train.py" else program
        raise in_two_parts(error, command, typed) from None
    except click.Abort:
        write_error("interrupted")
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def load_command(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: click.Command = getattr(import_module(module), attribute)
    return command


def render_commands() -> str:
    """The other commands, one per line, for the help."""
    return "\n".join(f"  {TRAIN} {usage:<22} {does}" for _, usage, does in COMMANDS.values())


@click.command(
    "train",
    cls=interruptible(
        "interrupted before the first step; checkpoints are as they were",
        inspect="interrupted; nothing was trained",
        calibrate="interrupted before the verdict; nothing was trained",
    ),
    help=TRAINING.format(commands=render_commands()),
    verbs=VERBS,
    context_settings=CONTEXT,
)
@click.argument("config_path", metavar="CONFIG")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--fsdp-config", metavar="FILE", help="Take the FSDP options from a file of `accelerate config`.")
@click.option("--as", "kind", metavar="KIND", help="Read the file as this kind if its keys do not tell: config.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="The run folder, new or to continue.")
@click.option(
    "--inspect",
    is_flag=True,
    help="Show what a run would train on, and how; then stop. `torchferry inspect` does the same.",
)
@click.option("--samples", type=click.IntRange(min=0), metavar="N", help="With --inspect: rows to show [3].")
@click.option(
    "--card-gib", type=float, metavar="N", help="With --inspect: GiB of GPU memory to plan for [this GPU's, or 80]."
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="Time micro-batch sizes, name the best, and stop. `torchferry calibrate` does the same.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="With --inspect or --calibrate: print the result as one JSON object."
)
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
def train_command(
    config_path: str,
    overrides: tuple[str, ...],
    fsdp_config: str | None,
    kind: str | None,
    run_dir: Path | None,
    inspect: bool,
    samples: int | None,
    card_gib: float | None,
    calibrate: bool,
    as_json: bool,
    debug: bool,
) -> None:
    if (samples is not None or card_gib is not None) and not inspect:
        given = "--samples" if samples is not None else "--card-gib"
        raise UserError(f"{given} has a meaning only with --inspect", hint="add --inspect")
    if card_gib is not None and not 0 < card_gib < MOST_CARD_GIB:  # also rejects nan, which a click.FloatRange accepts
        raise click.UsageError(f"--card-gib is {card_gib:g}, and must be above 0 and below {MOST_CARD_GIB}")
    if inspect and calibrate:
        raise click.UsageError("--inspect and --calibrate are two questions: ask one at a time")
    if as_json and inspect == calibrate:
        raise click.UsageError("--json belongs to --inspect or --calibrate")
    if run_dir is not None and (inspect or calibrate):
        raise click.UsageError("--run-dir belongs to a run: --inspect and --calibrate have no run folder")
    program = click.get_current_context().command_path
    place: Place = Alone() if inspect else take_place(program)
    if not isinstance(place, Rank) and JOB_ID_ENV not in os.environ:  # a job's config.yaml is a config
        expect(read_kind(config_path, named=kind), config_path, CONFIG, program=deployer_of(program))
    check_torch()
    world = world_of(place, os.environ)
    config = load_config(config_path, overrides, fsdp_config=fsdp_config, tell=tell_note, world=world)
    if inspect:
        show_inspection(config, samples=3 if samples is None else samples, card_gib=card_gib, as_json=as_json)
        return
    if calibrate:
        sys.exit(start_calibration(config, place, as_json=as_json, debug=debug))
    said = render_place(place)
    if said is not None:
        write_line(sys.stdout, said)
    if isinstance(place, Rank):
        prepare_rank(config, run_dir)
        sys.exit(train(config, run_dir or _run_dir_of_env(), debug=debug))
    start(config, run_dir or _run_dir_of_env(), place, debug=debug)


def deployer_of(program: str) -> str:
    """The deployer's name, given the name that the trainer was called by: `torchferry` for `torchferry train`."""
    first, _, command = program.rpartition(" ")
    return first if command and first else "python deploy.py"


def tell_note(note: str) -> None:
    """Prints once, not on every rank, a note on values of a config that have no effect."""
    if os.environ.get("RANK", "0") == "0":
        write_line(sys.stderr, f"note: {shown(note)}")


def show_inspection(config: Config, *, samples: int, card_gib: float | None, as_json: bool) -> None:
    """Print what a run would do. Raises ConfigError, DataError and ModelError as the run itself would."""
    if config.script is not None:
        raise ConfigError(f"script is {config.script!r}: --inspect looks at the trainer only")
    from trainer.inspection.inspect_run import inspect_run  # imports torch
    from trainer.inspection.view import inspection_to_dict, print_inspection

    with redirect_stdout(sys.stderr):  # messages on the way are not part of the output
        inspection = inspect_run(config, samples=samples, card_gib=card_gib)
    if as_json:
        write_json(inspection_to_dict(inspection))
    else:
        print_inspection(inspection, sys.stdout)


def read_names_as_utf8() -> None:
    """Start this program again in Python's UTF-8 mode, if the locale has another encoding: a config is UTF-8 and
    contains file names, which are bytes. The programs that it starts inherit the mode."""
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get(UTF8_MODE_ENV) == "1":
        return
    argv = [os.fsencode(word) for word in sys.orig_argv[1:]]
    os.execve(sys.executable, [os.fsencode(sys.executable), *argv], {**os.environ, UTF8_MODE_ENV: "1"})


def check_torch() -> None:
    """Raise ConfigError if the trainer's requirements are not installed: the deployer itself needs no torch. Modules
    imported from here on use the bytecode cache."""
    torch = find_spec("torch")
    if torch is None:
        project = Path(trainer.__file__).parent.parent
        extra = "-e '.[train]'" if (project / "pyproject.toml").exists() else "'torchferry[train]'"
        raise ConfigError(f"torch is not installed for this Python ({sys.executable})", hint=f"pip install {extra}")
    caches.use_bytecode_cache(torch, os.environ)


def start(config: Config, run_dir: Path | None, place: Alone | Node, *, debug: bool) -> NoReturn:
    """Train in this process, or become torchrun when the config names several devices or several nodes take part.
    Raises ConfigError."""
    if config.script is not None:
        raise ConfigError(f"script is {config.script!r}: train.py runs the trainer only", hint="use deploy.py")
    prepare_host(config)
    if isinstance(place, Node):
        by_hand.prepare_node(config, place, click.get_current_context().command_path, tell=tell_note)
        if place.rank > 0:
            if run_dir is not None:
                forget_stop(run_dir)
            by_hand.start_node(config, place, run_dir and run_dir.absolute(), debug=debug)
    run_dir = (run_dir or launch.new_run_dir(config, time.localtime())).absolute()
    with holding(run_dir):
        launch.write_config(config, run_dir)
        forget_stop(run_dir)
    write_line(sys.stdout, f"run folder: {run_dir}")
    if isinstance(place, Node):
        by_hand.start_node(config, place, run_dir, debug=debug)
    processes = num_processes(config)
    if processes == 1:
        sys.exit(train(config, run_dir, debug=debug))
    argv = launch.build_torchrun_argv(
        sys.executable, sys.argv[0], run_dir / CONFIG_FILE, processes=processes, debug=debug
    )
    launch.relaunch(argv, run_dir)


def prepare_host(config: Config) -> None:
    """Choose and check the devices, and set the environment variables that torch reads when it is imported."""
    here = config
    if launch.has_auto_gpus(config):
        here = launch.choose_gpus(config, os.environ, launch.read_gpu_usage())
    launch.check_target(here, launch.read_host_gpus(), os.environ)
    os.environ.update(launch.build_launch_env(here, os.environ, cores=available_cores()))


def start_calibration(config: Config, place: Place, *, as_json: bool, debug: bool) -> int:
    """Time micro-batches in this process or in the ranks of a torchrun; returns the exit code. Raises ConfigError."""
    if isinstance(place, Node):
        tell_note(f"--calibrate uses this node alone, not all {place.nodes}")
    if config.script is not None:
        raise ConfigError(f"script is {config.script!r}: --calibrate is about the trainer only")
    if isinstance(place, Rank):
        prepare_rank(config, None)
    else:
        prepare_host(config)
        if num_processes(config) > 1:
            options = ["--calibrate", *(["--json"] if as_json else [])]
            return launch.run_torchrun(config, sys.argv[0], options=options, debug=debug)
    os.environ.update(compile_cache(config))
    from trainer.calibration.calibrate import calibrate_rank  # imports torch

    return calibrate_rank(config, as_json=as_json, debug=debug)


@contextmanager
def holding(run_dir: Path) -> Iterator[None]:
    """Lock the folder, once no other run uses it, while its content is changed; later its rank locks it until the end.

    Raises ConfigError if it stays in use or cannot be written.
    """
    try:
        with _needing(run_dir):
            taken = acquire_run_folder(run_dir, patience_s=0)
        if taken:
            write_line(sys.stdout, f"waiting up to {PATIENCE_S:.0f} s: {taken}")
            with _needing(run_dir):
                taken = acquire_run_folder(run_dir)
        if taken:
            raise ConfigError(taken, hint=IN_USE_HINT)
        with _needing(run_dir):
            yield
    finally:
        release_all()


@contextmanager
def _needing(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror  # no file for a full disk
        raise ConfigError(f"the run folder {run_dir} cannot be written: {why}") from error


def prepare_rank(config: Config, run_dir: Path | None) -> None:
    """Does for one rank, whose torchrun was started by hand, what `start` does for its ranks."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        if launch.has_auto_gpus(config):  # each rank would choose separately
            hint = "export CUDA_VISIBLE_DEVICES, or let `train.py CONFIG` start torchrun"
            raise ConfigError("under a torchrun of your own nobody chooses the GPUs of auto:N", hint=hint)
        launch.check_ranks(config, os.environ)
        os.environ.update(launch.build_launch_env(config, os.environ, cores=available_cores()))
    if run_dir is not None and os.environ.get("LOCAL_RANK", "0") == "0":  # the folder may not be that of rank 0's node
        forget_stop(run_dir)


def forget_stop(run_dir: Path) -> None:
    """Remove a stop request for an earlier start. In a deployed job the file belongs to the supervisor and may be
    new."""
    if JOB_ID_ENV not in os.environ:
        with suppress(OSError):  # on a read-only disk there is no such file, and the next write raises the error
            (run_dir / STOP_FILE).unlink()


def train(config: Config, run_dir: Path | None, *, debug: bool) -> int:
    """Run the recipe as one rank, and return the exit code. One rank prints a failure, as one paragraph."""
    os.environ.update(compile_cache(config))
    for name, value in launch.build_debug_env(config).items():  # a deployed rank learns of it only from its config
        os.environ.setdefault(name, value)
    startup = Startup.of_process(os.environ)
    startup.enter("imports")
    if os.environ.get("RANK", "0") == "0":
        startup.watch(partial(write_line, sys.stdout))
    from trainer.start.rank import run_rank  # imports torch

    return run_rank(config, run_dir, debug=debug, startup=startup)


def compile_cache(config: Config) -> dict[str, str]:
    """Variables with which a rank that may compile reuses the compiled code of earlier starts."""
    for_cpu = launch.device_kind(config) == "cpu"
    if for_cpu and not config.parallel.compile:
        return {}
    cache = caches.open_compile_cache({**os.environ, **config.target.env}, for_cpu=for_cpu)
    if cache.note and os.environ.get("RANK", "0") == "0":
        write_line(sys.stdout, cache.note)
    return cache.env


def _run_dir_of_env() -> Path | None:
    value = os.environ.get(RUN_DIR_ENV)
    return Path(value) if value else None
