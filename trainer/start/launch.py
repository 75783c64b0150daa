"""From a config to running ranks: in this process, or by replacing it with torchrun. Imports no torch.

The functions that decide (`build_…`, `check_…`) change nothing; only `relaunch` replaces the process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, NoReturn

from trainer.config.load import ConfigError, config_to_yaml, local_data_paths, num_processes
from trainer.files import expanded, replace_text
from trainer.metrics.trackers import check_trackers
from trainer.schema import AUTO_GPUS, CONFIG_FILE, JOB_ID_ENV, RUN_DIR_ENV, STARTED_ENV, Config, gpu_count
from trainer.start.place import without_torchruns
from trainer.startup import now_s, process_start_s
from trainer.words import first_few

DeviceKind = Literal["cuda", "cpu"]

TORCHRUN = str(Path(__file__).with_name("torchrun.py"))

GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""If torch can find a GPU, one of these files exists: NVIDIA's driver, WSL, ROCm."""
QUERY_GPUS = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]


QUERY_USAGE = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
BUSY_MIB = 1024
"""MiB of memory in use above which `auto:N` does not take a GPU."""


TELLING_S = 10.0
"""Seconds that rank 0 may need on a busy machine to report an error."""


class GpuUsage(NamedTuple):
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    used_mib: int


@dataclass(frozen=True)
class HostGpus:
    """What is known about this host's GPUs. `names` (indices and UUIDs) is None if nvidia-smi does not list them."""

    present: bool
    names: frozenset[str] | None = None
    count: int = 0


def device_kind(config: Config) -> DeviceKind:
    """`auto` means CUDA: a silent fallback to the CPU would look like a very slow run."""
    return "cpu" if config.target.device == "cpu" else "cuda"


def let_rank_0_tell() -> None:
    """Sleep so that rank 0 can report an error first. Other ranks call it before they report theirs: usually all ranks
    find the same error.

    torchrun ends all ranks when the first one exits, and that ends this rank once rank 0 has reported. A rank that is
    still running after the sleep has found an error that rank 0 has not.
    """
    with suppress(KeyboardInterrupt):
        time.sleep(TELLING_S)


def build_torchrun_argv(
    python: str, script: str, config_path: Path, *, processes: int, debug: bool, options: Sequence[str] = ()
) -> list[str]:
    """The command that starts `processes` ranks on this node; with `--standalone` no port is needed."""
    torchrun = [python, TORCHRUN, "--standalone", f"--nproc-per-node={processes}", "--max-restarts=0"]
    return [*torchrun, script, str(config_path), *options, *(["--debug"] if debug else [])]


def build_launch_env(config: Config, environ: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """The variables that must be set before this process or torchrun's ranks import torch."""
    env = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that indices are those of nvidia-smi
        "CUDA_VISIBLE_DEVICES": _visible_devices(config),
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in environ:  # torchrun would set 1 and print a note
        env["OMP_NUM_THREADS"] = str(max(1, cores // num_processes(config)))
    return {**env, **build_debug_env(config), **config.target.env}


def build_debug_env(config: Config) -> dict[str, str]:
    """The variables for `train.debug_distributed`; torch and NCCL read them when they start."""
    level = config.train.debug_distributed
    if level == "off":
        return {}
    return {
        "TORCH_DISTRIBUTED_DEBUG": level.upper(),
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",  # torch's record of collectives; the watchdog writes it to a file
        "NCCL_DEBUG": "INFO",
    }


def _visible_devices(config: Config) -> str:
    return "" if device_kind(config) == "cpu" else ",".join(str(gpu) for gpu in config.target.gpu_ranks)


def check_target(config: Config, gpus: HostGpus, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for missing secrets, local files or GPUs, which would fail later in every rank."""
    missing = [name for name in config.target.secrets if name not in environ]
    if missing:
        raise ConfigError(f"target.secrets names {first_few(missing, 8)}, which the environment does not have")
    absent = [path for path in local_data_paths(config) if not expanded(path).exists()]
    if absent:
        raise ConfigError(
            f"there is no {expanded(absent[0]).absolute()}",
            hint=f"the config names {absent[0]!r} as data, model, tokenizer or template; relative paths start here",
        )
    check_trackers(config)
    if device_kind(config) == "cuda":
        check_gpus(config.target.gpu_ranks, gpus)


def has_auto_gpus(config: Config) -> bool:
    return device_kind(config) == "cuda" and AUTO_GPUS.fullmatch(str(config.target.gpu_ranks[0])) is not None


def choose_gpus(config: Config, environ: Mapping[str, str], usage: Sequence[GpuUsage] | None) -> Config:
    """The config with `auto:N` replaced by the launcher's choice, else by the GPUs of `usage` with the least memory in
    use. Raises ConfigError if too few are free, or if their use is unknown (None)."""
    count = gpu_count(config.target.gpu_ranks)
    given = environ.get("CUDA_VISIBLE_DEVICES") if JOB_ID_ENV in environ else None
    chosen: list[int | str] = [_rank_of(text) for text in given.split(",")] if given else []
    chosen = chosen or _freest(count, usage)
    return replace(config, target=replace(config.target, gpu_ranks=chosen))


def _freest(count: int, usage: Sequence[GpuUsage] | None) -> list[int | str]:
    auto = f"target.gpu_ranks is auto:{count}"
    if usage is None:
        hint = "name them: target.gpu_ranks=0,1; target.device=cpu trains without"
        raise ConfigError(f"{auto}, but nvidia-smi does not tell which GPUs are free", hint=hint)
    free = sorted((gpu.used_mib, gpu.index) for gpu in usage if gpu.used_mib <= BUSY_MIB)
    if len(free) < count:
        busy = ", ".join(f"{gpu.index} ({gpu.used_mib} MiB in use)" for gpu in usage if gpu.used_mib > BUSY_MIB)
        message = f"{auto}, and of this host's {len(usage)} GPUs {len(free)} are free"
        raise ConfigError(message + (f"; busy: {busy}" if busy else ""), hint="name them to run beside others")
    return sorted(index for _, index in free[:count])


def _rank_of(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def check_gpus(gpu_ranks: Sequence[int | str], gpus: HostGpus) -> None:
    """Raise ConfigError if the host is known to lack one of the GPUs."""
    if not gpus.present:
        raise ConfigError("this host has no GPU", hint="train on the CPU with target.device=cpu")
    if gpus.names is None:
        return
    named = [str(gpu) for gpu in gpu_ranks if not str(gpu).startswith("MIG-")]  # slices are not in this list
    lacking = [gpu for gpu in named if gpu not in gpus.names]
    if lacking:
        has = f"indices 0 to {gpus.count - 1}" if gpus.count else "no GPU"
        raise ConfigError(
            f"target.gpu_ranks names {first_few(lacking, 8)}, and this host has {has}",
            hint="`nvidia-smi -L` lists them; target.device=cpu trains without",
        )


def check_ranks(config: Config, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher starts more ranks on this node than the config names GPUs."""
    ranks, gpus = environ.get("LOCAL_WORLD_SIZE", ""), num_processes(config)
    if device_kind(config) == "cuda" and ranks.isdigit() and int(ranks) > gpus:
        message = f"the launcher starts {ranks} ranks on this node, but target.gpu_ranks names {gpus} GPU(s)"
        raise ConfigError(message, hint="name one GPU for each rank of a node: target.gpu_ranks=0,1")


def read_gpu_usage() -> list[GpuUsage] | None:
    """Memory in use on each GPU; None if nvidia-smi cannot report it."""
    try:
        answer = subprocess.run(QUERY_USAGE, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    usage = [
        GpuUsage(int(row[0]), int(row[1])) for row in rows if len(row) == 2 and row[0].isdigit() and row[1].isdigit()
    ]
    return usage if answer.returncode == 0 and usage else None


def read_host_gpus() -> HostGpus:
    """The host's GPUs from nvidia-smi; without it, only whether there is a driver."""
    present = any(Path(path).exists() for path in GPU_DEVICE_FILES)
    if shutil.which(QUERY_GPUS[0]) is None:
        return HostGpus(present)
    try:
        answer = subprocess.run(QUERY_GPUS, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return HostGpus(present)
    return parse_gpus(answer.stdout) if answer.returncode == 0 else HostGpus(present)


def parse_gpus(csv: str) -> HostGpus:
    """Parses nvidia-smi's `index, uuid` lines."""
    rows = [[cell.strip() for cell in line.split(",")] for line in csv.splitlines() if "," in line]
    return HostGpus(bool(rows), frozenset(cell for row in rows for cell in row), len(rows))


def new_run_dir(config: Config, started: time.struct_time) -> Path:
    """Create and return `run.dir/NAME-YYYYmmdd-HHMMSS`; with a number appended if several runs start in one second."""
    parent, name = expanded(config.run.dir), f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S', started)}"
    for suffix in ["", *(f"-{number}" for number in range(2, 1000))]:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            (parent / f"{name}{suffix}").mkdir()
        except OSError as error:
            if isinstance(error, FileExistsError) and parent.is_dir():
                continue
            raise ConfigError(
                f"the run folder {(parent / name).absolute()} cannot be made: {error.strerror}",
                hint="set run.dir, or name a folder with --run-dir",
            ) from error
        return (parent / f"{name}{suffix}").absolute()
    raise ConfigError(f"{parent} already holds a thousand runs named {name}")


def write_config(config: Config, run_dir: Path) -> None:
    """Write the resolved config into the run folder, which is created if missing. Replaces an earlier config in one
    step."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_text(run_dir / CONFIG_FILE, config_to_yaml(config))
    except OSError as error:
        raise ConfigError(f"the run folder {run_dir} cannot be written: {error.strerror}") from error


def run_torchrun(config: Config, script: str, *, options: Sequence[str], debug: bool) -> int:
    """Run ranks that need no run folder, and return torchrun's exit code. KeyboardInterrupt ends them."""
    with TemporaryDirectory() as folder:
        write_config(config, Path(folder))
        argv = build_torchrun_argv(
            sys.executable,
            script,
            Path(folder) / CONFIG_FILE,
            processes=num_processes(config),
            debug=debug,
            options=options,
        )
        return _call_deaf(argv, {**without_torchruns(os.environ), RUN_DIR_ENV: folder})


def _call_deaf(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a program that does not receive Ctrl-C, and return its exit code. Only this process receives Ctrl-C, and then
    ends the program."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the program and its children
    try:
        with subprocess.Popen(argv, env=env) as process:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                return process.wait()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def relaunch(argv: Sequence[str], run_dir: Path | None) -> NoReturn:
    """Replace this process by torchrun. The process ID stays, so signals and waits of the parent apply to torchrun.
    `run_dir`: None if torchrun learns of it from another node."""
    sys.stdout.flush()
    sys.stderr.flush()
    started = f"{process_start_s(now_s()):.2f}"  # of this process, which continues as torchrun
    env = {**without_torchruns(os.environ), STARTED_ENV: started}
    os.execve(argv[0], list(argv), env if run_dir is None else {**env, RUN_DIR_ENV: str(run_dir)})
