"""The trainer's programs in the world: a launcher as `train.py` and torchrun are one, its ranks, and their savers.

What decides is the shipped source; what computes (model, data, recipe) is small enough to be known beforehand.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import types
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path as RealPath
from typing import Any

from tests.world.linux import calls
from tests.world.linux.calls import kernel, this
from tests.world.linux.imports import PREFIX, Package
from tests.world.linux.kernel import Killed
from tests.world.linux.modules import MODULES, OS, TIME
from tests.world.programs import OTHERS, Body, in_python
from tests.world.trainer import groups
from tests.world.trainer.fake_torch import TENSOR_BYTES, Module, Optimizer, Reader, Tensor, make_torch, tensor_of
from tests.world.trainer.paths import Path
from tests.world.trainer.stdlib import OwnCount, OwnList, end_pools, make_modules

TRAINER = RealPath(__file__).resolve().parents[3] / "trainer"
RUN_DIR = "/runs/one"
START = "WORLD_START"
"""The variable that says of which start a process is."""
TENSORS = 4
"""Of the model; tensor i is on rank i % ranks."""
GRACE_S = 120.0
"""How long torchrun lets its ranks save after a stop: STOP_GRACE_S of trainer/start/torchrun.py."""
TORCH = make_torch()
SHIPPED = Package(
    TRAINER,
    "trainer",
    place="/opt/torchferry/trainer",
    modules={**make_modules(), **TORCH},
    instead={
        "trainer.run_folder": {"_held": OwnList("held")},
        "trainer.saver.writer": {"_numbers": OwnCount()},
        "trainer.failures.diagnose": {"is_ours": lambda error: type(error).__module__.startswith(f"{PREFIX}trainer.")},
        "trainer.failures.watchdog": {
            "is_waiting": lambda process: bool(process.own.get("waits")),
            "place_of": lambda process: "train.py:1 (train)",
        },
        "trainer.checkpoint.shards": {"differences": lambda path, model, optimizer=None: _missing(path, model)},
        "trainer.checkpoint.states": {
            "random_state": lambda: {"torch": this().own["random"]},
            "set_random_state": lambda state: this().own.__setitem__("random", state["torch"]),
        },
    },
)
load = SHIPPED.load


# --- what the model computes ------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)  # a schedule's own; a search has many
def content(seed: int, name: str, step: int) -> bytes:
    """Of a tensor after a step: each is made of the one before."""
    if step == 0:
        return hashlib.blake2b(f"{seed} {name}".encode(), digest_size=TENSOR_BYTES).digest()
    return after(content(seed, name, step - 1), step)


def after(before: bytes, step: int) -> bytes:
    return hashlib.blake2b(before + bytes([step]), digest_size=TENSOR_BYTES).digest()


def random_of(seed: int, rank: int, step: int) -> bytes:
    """A rank's random state."""
    return f"random {seed} {rank} {step}".encode()


@lru_cache(maxsize=1024)
def loss_of(seed: int, step: int) -> float:
    """On held-out data."""
    return int.from_bytes(content(seed, "loss", step)[:2], "big") / 65536


def names_of(rank: int, ranks: int) -> list[str]:
    return [f"w{number}" for number in range(TENSORS) if number % ranks == rank]


def _missing(path: Any, model: Module) -> list[str]:
    """What this rank's part needs and the checkpoint lacks: torch's sharded tensors have a part on each."""
    kept = Reader(path).read_metadata().state_dict_metadata
    return [f"only this run has {name}" for name in model.tensors if f"model.{name}" not in kept]


# --- in the place of what computes ------------------------------------------------------------------------------------


class _Data:
    """The training data: a place in them."""

    global_batch_size = 1

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps

    def state_dict(self, step: int) -> dict[str, int]:
        return {"step": step}

    def load_state_dict(self, state: Any) -> None:
        pass

    def take_notes(self) -> list[str]:
        return []


class _Log:
    """What is told, by rank 0."""

    def __init__(self, is_main: bool) -> None:
        self._is_main = is_main

    def note(self, text: str) -> None:
        if self._is_main:
            load("trainer.console").write_line(MODULES["sys"].stdout, text)

    def evaluation(self, record: Any) -> None:
        pass

    def close(self) -> None:
        pass


class _Memory:
    def __init__(self, device: Any) -> None:
        pass

    @contextmanager
    def left_out(self) -> Any:
        yield


class _Steps:
    """In the place of train.values.Reader: there is nothing to read late."""

    def __init__(self, run: Any, memory: Any) -> None:
        pass

    def push(self, values: Any) -> None:
        pass

    def drain(self, at_end: bool = False) -> None:
        pass

    def restart_clock(self) -> None:
        pass


@contextmanager
def _watched(watchers: Any, step: int) -> Any:
    yield []


def _train_step(run: Any, step: int, lr: float) -> None:
    """A step as all ranks make it together."""
    progress, plan = run.dist.progress, plan_of()
    progress.enter("data", step + 1)
    progress.enter("forward")
    TIME.sleep(plan.step_s * (0.5 + kernel().chance.random()))
    progress.enter("backward")
    if run.dist.world_size > 1:
        steps = groups.default_group().exchange(step)
        if set(steps) != {step}:
            kernel().failure = kernel().failure or f"the ranks are at different steps: {steps}"
    progress.enter("optimizer")
    for tensor in (*run.module.tensors.values(), *run.optimizer.tensors.values()):
        tensor.content = after(tensor.content, step + 1)
    this().own["random"] = random_of(plan.seed, run.dist.rank, step + 1)


def _evaluate(run: Any, is_stop_requested: Any) -> Any:
    run.dist.progress.enter("evaluation")
    TIME.sleep(plan_of().step_s)
    return types.SimpleNamespace(loss=loss_of(plan_of().seed, run.dist.progress.step), tokens=1, metrics={})


def plan_of() -> Any:
    """The schedule under way."""
    return kernel().plan  # type: ignore[attr-defined]


def _recipe(config: Any, run_dir: Any, dist: Any) -> int:
    """As trainer.recipes.causal_lm: build, resume, train, finish."""
    plan, resume, loop = plan_of(), load("trainer.checkpoint.resume"), load("trainer.train.loop")
    this().own["progress"] = dist.progress
    names = names_of(dist.rank, dist.world_size)
    module = Module({name: tensor_of(content(plan.seed, name, 0)) for name in names})
    optimizer = Optimizer({name: tensor_of(content(plan.seed, f"{name} avg", 0)) for name in names})
    this().own["random"] = random_of(plan.seed, dist.rank, 0)
    data = types.SimpleNamespace(train=_Data(plan.steps))
    TIME.sleep(0.1)
    kernel().say("choosing", this())
    choice = resume.choose(config, run_dir, dist)
    identity = resume.CheckpointRequirements({"kind": "world"})
    resumed, notes = resume.resume(choice, identity, module, optimizer, data.train, dist)
    kernel().say("resumed", (this(), dist, resumed, module, optimizer))
    log = _Log(dist.is_main)
    for note in notes:
        log.note(note)
    run = types.SimpleNamespace(
        config=config,
        run_dir=run_dir,
        dist=dist,
        module=module,
        optimizer=optimizer,
        data=data,
        log=log,
        state=None,
        evaluate=_evaluate,
        sample=None,
        extra={**(resumed.extra if resumed else {}), "shape": {"kind": "world"}},
        start_step=resumed.step if resumed else 0,
        is_due=lambda step, every: step == plan.steps or (every > 0 and step % every == 0),
    )
    beside = load("trainer.saver.writer").AsyncSave(wait_from_bytes=plan.wait_from_bytes)
    result = loop.train(run, beside=beside)
    return int(load("trainer.export.finish").finish(run, result, shape=None, tokenizer=None))


def _stand(name: str, **names: Any) -> None:
    """A module in the place of the shipped one."""
    made = types.ModuleType(f"{PREFIX}{name}")
    made.__dict__.update(names)
    SHIPPED.modules[name] = made
    sys.modules[made.__name__] = made


class _NonFinite(Exception):
    """Nothing here is."""


def _write_config(config: Any, run_dir: Any) -> None:
    """As trainer.start.launch.write_config."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        load("trainer.files").replace_text(run_dir / "config.yaml", "a: config\n")
    except OSError as error:
        raise load("trainer.errors").ConfigError(f"the run folder {run_dir} cannot be written: {error}") from error


def _furnish() -> None:
    nothing = type("Nothing", (), {})
    _stand("trainer.tensors", local_tensor=lambda tensor: tensor, fsdp_modules=lambda module: ())
    _stand("trainer.checkpoint.reader", PlainReader=Reader)
    _stand("trainer.batch", add_terms=None)
    _stand(
        "trainer.saver.copy_memory",
        SpareMemory=nothing,
        expected_bytes=lambda model, optimizer: 64 * 2 * len(model.tensors),
        why_no_room=lambda needed, available=None: None,
    )
    _stand("trainer.data.batches.steps", Loader=_Data)
    _stand("trainer.optim.build", had_8bit_embeddings=lambda saved: False)
    _stand(
        "trainer.optim.schedules",
        lr_multiplier=lambda optim, total: lambda step: 1.0,
        peak_learning_rate=lambda optim, size: 1.0,
    )
    _stand("trainer.config.train", saves_the_best=lambda config: False)
    errors = load("trainer.errors")
    _stand(
        "trainer.config.load",
        ConfigError=errors.ConfigError,
        config_to_dict=lambda config: {},
        load_config=None,
        num_processes=None,
    )
    _stand("trainer.metrics.trackers", check_trackers=lambda config: None)
    _stand(
        "trainer.start.launch",
        device_kind=lambda config: "cpu",
        write_config=_write_config,
        let_rank_0_tell=lambda: TIME.sleep(10.0),
    )
    _stand("trainer.train.run", Run=nothing, Result=_Result, Evaluated=nothing)
    _stand("trainer.train.values", PeakMemory=_Memory, Reader=_Steps, NonFiniteError=_NonFinite)
    _stand(
        "trainer.train.step",
        StepWatcher=nothing,
        train_step=_train_step,
        watched=_watched,
        is_watched=lambda run, step: False,
    )
    for name in ("adapter", "generation", "model"):
        missing = {"export_adapter", "generation_of", "Rows", "export_tensors", "random_rows", "rows_of"}
        _stand(f"trainer.export.{name}", **dict.fromkeys(missing))
    _stand("trainer.models.hf", gather_full=None)
    _stand("trainer.models.lora", lora_of=None, merge=None)
    _stand("trainer.models.protocol", Shape=None)
    _stand("trainer.recipes.world", run=_recipe)


class _Result:
    def __init__(self, step: int, **words: Any) -> None:
        self.step = step
        self.reason = None
        self.__dict__.update(words)


_furnish()


def config_of(plan: Any) -> Any:
    train = {
        "resume": "auto",
        "async_save": plan.beside,
        "save_every": plan.save_every,
        "keep_last": plan.keep_last,
        "keep_best": plan.keep_best,
        "keep_every": plan.keep_every,
        "eval_every": plan.save_every if plan.keep_best else 0,
        "stop_after_steps": None,
        "max_nonfinite_steps": 10,
        "early_stop_patience": None,
        "early_stop_min_delta": 0.0,
        "hang_timeout_s": plan.hang_timeout_s,
    }
    return types.SimpleNamespace(
        recipe="world",
        script=None,
        optim=None,
        run=types.SimpleNamespace(export=False, export_from="last"),
        train=types.SimpleNamespace(**train),
    )


# --- programs ---------------------------------------------------------------------------------------------------------


def program_of(argv: list[str]) -> Body | None:
    if argv[0] == "rank":
        return in_python(_rank)
    if argv[1:3] == ["-m", "trainer.saver.main"]:
        return in_python(_saver)
    return None


OTHERS.append(program_of)


def _saver() -> None:
    load("trainer.saver.main").main()


def _take_in_torch(count: int) -> None:
    """torch.set_num_threads is the first of torch that a saver calls: its import has taken its while."""
    TIME.sleep(plan_of().import_s)


TORCH["torch"].__dict__["set_num_threads"] = _take_in_torch


def _rank() -> None:
    try:
        startup = load("trainer.startup").Startup()
        code = load("trainer.start.rank").run_rank(config_of(plan_of()), Path(RUN_DIR), debug=False, startup=startup)
        raise SystemExit(code)
    except Killed:
        raise
    except BaseException:
        end_pools()
        raise


def train(ranks: int) -> None:
    """As `python train.py CONFIG`, which becomes a rank or torchrun."""
    errors, folder = load("trainer.errors"), Path(RUN_DIR)
    try:
        with load("trainer.commands.cli").holding(folder):
            _write_config(None, folder)
    except errors.UserError as error:
        load("trainer.console").write_line(MODULES["sys"].stderr, error.render())
        raise SystemExit(error.exit_code) from None
    except OSError as error:  # of its output: as trainer.commands.cli.main
        load("trainer.console").write_line(MODULES["sys"].stderr, f"Error: {error.strerror}")
        raise SystemExit(1) from None
    if ranks == 1:
        this().argv = ["rank"]
        this().own.clear()
        kernel().say("exec", this())
        _rank()
    else:
        raise SystemExit(_torchrun(ranks, folder))


def _torchrun(ranks: int, folder: Any) -> int:
    """Serves the store, starts the ranks, and ends the others when one fails or it is asked to stop itself."""
    with suppress(OSError):
        (folder / "outcome.json").unlink()
    port = 20000 + int(this().env[START])
    groups.serve(port)
    told: list[int] = []
    MODULES["signal"].signal(signal.SIGTERM, lambda number, frame: told.append(number))
    started = []
    for rank in range(ranks):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        env = {name: str(value) for name, value in places.items()}
        env |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
        try:
            started.append(MODULES["subprocess"].Popen(["rank"], env={**this().env, **env}))
        except OSError as refused:  # a trace of torchrun's own, which is not ours
            told.append(refused.errno or 0)
    failures: dict[int, Any] = {}
    while any(one.poll() is None for one in started) and not failures and not told:
        TIME.sleep(0.1)
        failures = {rank: _Failure(one.returncode) for rank, one in enumerate(started) if one.returncode}
    for one in started:
        one.terminate()
    ends = TIME.monotonic() + GRACE_S
    for one in started:
        while one.poll() is None and TIME.monotonic() < ends:
            TIME.sleep(0.1)
        one.kill()
        one.wait()
    report = load("trainer.start.torchrun")
    if told:
        return 0 if report._read(folder / "outcome.json").state in ("stopped", "succeeded") else 128 + signal.SIGTERM
    return int(report.report(types.SimpleNamespace(failures=failures), folder)) if failures else 0


class _Failure:
    """As torch.distributed.elastic.multiprocessing.errors.ProcessFailure."""

    def __init__(self, code: int) -> None:
        self.exitcode, self.timestamp = code, TIME.time()

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


__all__ = ["OS", "Tensor", "calls"]
