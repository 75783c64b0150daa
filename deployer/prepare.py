"""From a config and the command line to a plan and its shipment: reads the project, decides, starts nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deployer import manifest
from deployer.agent.tree import EXECUTABLE, FILE, Entry, file_hash, root_hash
from deployer.errors import UsageError
from deployer.launch import Shipment
from deployer.manifest import Scan
from deployer.plan import TRAINER_REQUIRES, Command, Include, LaunchPlan, PythonSpec, build_plan, new_job_id
from trainer.config import ConfigError, check_config, config_to_yaml, load_config, local_data_paths
from trainer.schema import Config, RunConfig, TargetConfig

ASK_TREE_BYTES = 500 * 10**6
ASK_FILE_BYTES = 100 * 10**6
CLIENT_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Options:
    """The command line's options of a launch."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    torchrun: bool = False
    ssh: str | None = None
    gpus: str | None = None
    device: str | None = None
    name: str | None = None
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    root: str | None = None
    python: str | None = None
    include: tuple[str, ...] = ()
    wheels: str | None = None
    allow_busy: bool = False
    yes: bool = False


@dataclass(frozen=True)
class Prepared:
    """All that a launch needs, decided."""

    plan: LaunchPlan
    shipment: Shipment
    code: Scan
    payload: dict[str, Any]
    """Values of the job's environment and secrets; they travel beside the plan and show in no process list."""
    git: dict[str, Any] | None


def read_config(options: Options) -> tuple[Config, Command | None]:
    """The config with the options applied, and the program when it is not the trainer. UsageError for a mistake."""
    try:
        config = load_config(options.config, options.overrides) if options.config else _config_of_command(options)
        config = _with_options(config, options)
        check_config(config)
    except ConfigError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None
    command = Command(options.command, options.torchrun) if options.command else None
    if command is None and config.script:
        command = Command(("python", config.script, *config.args), config.torchrun)
    return config, command


def prepare(config: Config, command: Command | None, *, options: Options, project: Path) -> Prepared:
    """Reads the project's tree and decides the plan. UsageError when something that the job needs would not travel."""
    code = manifest.scan(project, hash_cache=_hash_cache())
    own_trainer = (project / "train.py").is_file() and (project / "trainer" / "__init__.py").is_file()
    includes = {path: _scan_include(project, path) for path in _include_paths((*config.files, *options.include))}
    # an included folder comes whole, and an included link as its target: neither is also part of the code
    entries = [entry for entry in code.entries if not _is_below(entry.path.removeprefix("code/"), includes)]
    sources = dict(code.sources)
    if command is None and not own_trainer:
        lib_entries, lib_sources = _client_trainer()
        entries += lib_entries
        sources |= lib_sources
    if command is None:
        _check_data_paths(config, project, code=code, includes=list(includes), remote=config.target.ssh is not None)
    wheels = manifest.scan_include(Path(options.wheels), hash_cache=_hash_cache()) if options.wheels else None
    trees = {root_hash(entries): tuple(sorted(entries))}
    for scan in (*includes.values(), *([wheels] if wheels else [])):
        trees[root_hash(scan.entries)] = scan.entries
        sources |= scan.sources
    payload = _payload(config)
    plan = build_plan(
        config,
        job_id=new_job_id(config.run.name),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tree=root_hash(entries),
        own_trainer=own_trainer,
        command=command,
        python=PythonSpec(
            explicit=config.target.python,
            requires=requirements(config, command, project=project),
            lock="requirements.txt" if (project / "requirements.txt").is_file() else None,
            wheels=root_hash(wheels.entries) if wheels else None,
        ),
        includes=[
            Include(path, root_hash(scan.entries), (project / path).is_file()) for path, scan in includes.items()
        ],
        allow_busy=options.allow_busy,
        restrict_gpus=command is None or options.gpus is not None or options.config is not None,
        config_yaml=None if command else config_to_yaml(_without_client_keys(config)),
    )
    return Prepared(plan, Shipment(trees, sources), code, payload, manifest.git_state(project))


def large_files(code: Scan) -> str | None:
    """What to ask before sending a tree that is surprisingly large; None for a usual one."""
    big = [f"{path} ({size / 1e6:,.0f} MB)" for path, size in code.largest if size > ASK_FILE_BYTES]
    if big:
        return f"the code tree holds files over {ASK_FILE_BYTES // 10**6} MB: {', '.join(big)}"
    if code.total_bytes > ASK_TREE_BYTES:
        top = ", ".join(f"{path} ({size / 1e6:,.0f} MB)" for path, size in code.largest[:3])
        return f"the code tree is {code.total_bytes / 1e6:,.0f} MB; its largest files: {top}"
    return None


def requirements(config: Config, command: Command | None, *, project: Path) -> tuple[str, ...]:
    """What the job's interpreter must have: the trainer's packages, or those of the project's requirements.txt."""
    if command is None:
        data = [*config.data.train, *config.data.eval]
        hub = [d for d in data if not d.startswith("builtin:") and not re.search(r"\.(jsonl?|parquet)(\.gz)?\Z", d)]
        parquet = any(d.endswith(".parquet") for d in data)
        return (*TRAINER_REQUIRES, *(["datasets>=3.0"] if hub else []), *(["pyarrow"] if parquet else []))
    listed = _requirement_lines(project / "requirements.txt")
    return (*(["torch>=2.0"] if command.torchrun else []), *listed)


def _requirement_lines(path: Path) -> list[str]:
    """The plain requirements of a file; options and links cannot be checked by name and are left to the installer."""
    if not path.is_file():
        return []
    lines = (line.split(" #")[0].strip() for line in path.read_text(errors="replace").splitlines())
    return [line for line in lines if re.match(r"[A-Za-z0-9]", line) and "://" not in line and " --" not in line]


# --- options ----------------------------------------------------------------------------------------------------------


def _config_of_command(options: Options) -> Config:
    if not options.command:
        raise UsageError("nothing to run", hint="deploy.py CONFIG, or deploy.py run -- python my_train.py ARGS")
    if options.torchrun and options.gpus is None:
        raise UsageError("--torchrun needs --gpus: one process starts for each", hint="--gpus 0,1")
    program = next((a for a in options.command if a.endswith((".py", ".sh"))), options.command[0])
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(program).stem).strip("-.") or "job"
    return Config(run=RunConfig(name=name), target=TargetConfig())


def _with_options(config: Config, options: Options) -> Config:
    target, run = config.target, config.run
    if options.ssh is not None:
        target = replace(target, ssh=options.ssh)
    if options.gpus is not None:
        target = replace(target, gpu_ranks=[_gpu(text) for text in options.gpus.split(",")])
    if options.device is not None:
        target = replace(target, device=options.device)  # type: ignore[arg-type]  # click checks the choice
    if options.root is not None:
        target = replace(target, root=options.root)
    if options.python is not None:
        target = replace(target, python=options.python)
    env = {**target.env, **dict(_assignment(text) for text in options.env)}
    secrets = [*target.secrets, *(name for name in options.secrets if name not in target.secrets)]
    if options.name is not None:
        run = replace(run, name=options.name)
    return replace(config, target=replace(target, env=env, secrets=secrets), run=run)


def _gpu(text: str) -> int | str:
    text = text.strip()
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return text


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"--env {name!r} is not of the form NAME=VALUE")
    return name, value


def _payload(config: Config) -> dict[str, Any]:
    missing = [name for name in config.target.secrets if name not in os.environ]
    if missing:
        raise UsageError(
            f"the secret {missing[0]} is not set in this shell",
            hint=f"export {missing[0]}=… first; its value goes to the job's environment only",
        )
    secrets = {name: os.environ[name] for name in config.target.secrets}
    return {"env": dict(config.target.env), "secrets": secrets} if config.target.env or secrets else {}


def _without_client_keys(config: Config) -> Config:
    # values of --env stay out of config.yaml on the host: the plan names them, the job's environment holds them
    return replace(config, target=replace(config.target, env={}, ssh=None))


# --- what travels -----------------------------------------------------------------------------------------------------


def _hash_cache() -> Path:
    from deployer.registry import state_dir

    return state_dir() / "hashes"


def _client_trainer() -> tuple[list[Entry], dict[str, str]]:
    """The trainer that came with this client, below `lib/`."""
    scan = manifest.scan(CLIENT_ROOT / "trainer", prefix="lib/trainer/", hash_cache=None)
    train = CLIENT_ROOT / "train.py"
    digest = file_hash(str(train))
    mode = EXECUTABLE if os.access(train, os.X_OK) else FILE
    entry = Entry("lib/train.py", mode, train.stat().st_size, digest)
    return [*scan.entries, entry], {**scan.sources, digest: str(train)}


def _include_paths(paths: Sequence[str]) -> list[str]:
    """The paths in their plain form, each once, without those below another one."""
    plain = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    return [path for path in plain if not _is_below(path, [other for other in plain if other != path])]


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _scan_include(project: Path, path: str) -> Scan:
    clean = os.path.normpath(path)
    if os.path.isabs(path) or clean.startswith("..") or clean == ".":  # noqa: PTH117
        raise UsageError(
            f"--include {path} is not below the project {project}",
            hint="link it into the project (ln -s) and include the link: its target travels",
        )
    return manifest.scan_include(project / clean, hash_cache=_hash_cache())


def _check_data_paths(config: Config, project: Path, *, code: Scan, includes: Sequence[str], remote: bool) -> None:
    travelling = {entry.path.removeprefix("code/") for entry in code.entries}
    for path in local_data_paths(config, root=project):
        if os.path.isabs(path) or path.startswith("~"):  # noqa: PTH117
            if not remote and not Path(path).expanduser().exists():
                raise UsageError(f"{path}: no such file or folder")
            continue
        clean = os.path.normpath(path)
        if not (project / clean).exists():
            raise UsageError(f"{path}: no such file or folder in {project}")
        included = _is_below(clean, includes)
        in_tree = clean in travelling or any(name.startswith(clean + "/") for name in travelling)
        if not included and not in_tree:
            reason = code.why_ignored(clean)
            raise UsageError(
                f"{path} is left out of the code tree" + (f" ({reason.pattern} in {reason.source})" if reason else ""),
                hint=f"ship it once, by hash, with --include {path} (or files=[{path!r}] in the config)",
            )
