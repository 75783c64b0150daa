"""Fits a run into its GPUs: measures free memory, chooses a plan, and records plans that have failed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trainer.config.dropped import take_out
from trainer.config.keys import DROPPED
from trainer.config.parallel import backend_of
from trainer.data.batches.steps import micro_batches
from trainer.dist import Dist, gather
from trainer.files import replace_text
from trainer.memory.activations import Kernels
from trainer.memory.estimate import estimate_memory, savings
from trainer.memory.plans import Choice, MemoryPlan, choose_plan, possible_plans
from trainer.models.protocol import Shape
from trainer.schema import MEMORY_PLAN_FILE, Config
from trainer.typed import InvalidData, read_json

SHOWN_SAVINGS = 4


@dataclass(frozen=True)
class Fit:
    """A config in which all memory settings are decided."""

    config: Config
    choice: Choice | None = None
    """None: no plan is chosen."""
    lines: list[str] = field(default_factory=list)
    """Lines to print before the first step."""


def fit_memory(config: Config, shape: Shape, run_dir: Path, dist: Dist) -> Fit:
    """The config with the plan that fits into the GPU with the least free memory; every rank must call this.

    On the CPU, and with `parallel.memory` manual, the config is unchanged.
    """
    if dist.device.type != "cuda" or config.parallel.memory == "manual":
        return Fit(config)
    kernels = Kernels.on(dist.device, config.parallel)
    found = gather((free_bytes(dist.device), read_failed(run_dir, config, dist.world_size)), dist.control_group)
    failed = list(dict.fromkeys(name for _, names in found for name in names))
    free = min(free for free, _ in found)
    return fit_into(config, shape, free=free, world_size=dist.world_size, kernels=kernels, failed=failed)


class MemoryKeeper:
    """The current plan, the next one, and the record of failed plans in the run folder."""

    def __init__(self, config: Config, shape: Shape, run_dir: Path, dist: Dist) -> None:
        """Every rank must call this; see `fit_memory`."""
        self.given, self._shape, self._run_dir, self._dist = config, shape, run_dir, dist
        self.fit = fit_memory(config, shape, run_dir, dist)
        self._note()

    @property
    def config(self) -> Config:
        """The config with the values of the chosen plan."""
        return self.fit.config

    def take_next(self) -> Config | None:
        """Switch to the next plan in this process after the current one has failed. None if there is none, or if it
        would move the model's storage between GPU and CPU."""
        choice = self.fit.choice
        following = None if choice is None else choice.following
        if choice is None or following is None or following.chosen.plan.cpu_offload != choice.chosen.plan.cpu_offload:
            return None
        self.fit = Fit(planned(self.given, following.chosen.plan), following, [following.render()])
        self._note()
        return self.config

    def choose_again(self, config: Config) -> Config:
        """Choose the plan for a config that has changed; every rank must call this."""
        self.given = config
        self.fit = fit_memory(config, self._shape, self._run_dir, self._dist)
        return self.config

    def record_failure(self) -> str | None:
        """Record that the current plan has run out of memory. Returns a text about the next start; None: no plan."""
        choice = self.fit.choice
        if choice is None:
            return None
        following, plan = choice.following, choice.chosen.plan.render()
        try:
            self._write(list(dict.fromkeys([*choice.failed, plan])))
        except OSError as error:
            file = self._run_dir / MEMORY_PLAN_FILE
            return f"{file} cannot be written ({error.strerror}), so the next start will not know of it"
        if following is None:
            return f"{plan} is the last plan of parallel.memory=auto: none takes less"
        return (
            f"the next start in this run folder takes the next plan, {following.chosen.plan.render()}; in a job the "
            "host starts it by itself where target.max_restarts allows"
        )

    def _note(self) -> None:
        choice = self.fit.choice
        if choice is not None and self._dist.is_main:
            with suppress(OSError):  # a full disk is reported by the files that must be written
                self._write(list(choice.failed))

    def _write(self, failed: list[str]) -> None:
        assert self.fit.choice is not None
        setting = setting_of(self.given, self._dist.world_size)
        noted = {"plan": self.fit.choice.chosen.plan.render(), "failed": failed, "setting": setting}
        replace_text(self._run_dir / MEMORY_PLAN_FILE, json.dumps(noted, indent=1) + "\n")


def fit_into(
    config: Config,
    shape: Shape,
    *,
    free: int,
    world_size: int,
    kernels: Kernels | None = None,
    failed: Sequence[str] = (),
) -> Fit:
    """The config with the first plan that fits into `free` bytes of each GPU; pure."""
    kernels = kernels or Kernels.assumed(config)

    def needs(plan: MemoryPlan) -> int:
        return estimate_memory(shape, planned(config, plan), world_size=world_size, kernels=kernels).total

    plans = possible_plans(
        config.parallel,
        backend=backend_of(config, world_size),
        compiled=kernels.compiled,
        accumulates=micro_batches(config, world_size) > 1,
    )
    choice = choose_plan(plans, needs, free=free, failed=failed)
    chosen = planned(config, choice.chosen.plan)
    lines = [choice.render()]
    if not choice.fits:
        lines += ["warning: that is more than there is room for; what lowers it:"]
        lines += [f"  {saving.render()}" for saving in savings(shape, chosen, world_size=world_size)[:SHOWN_SAVINGS]]
    return Fit(chosen, choice, lines)


def planned(config: Config, plan: MemoryPlan) -> Config:
    """The config with the values of the plan."""
    return replace(config, parallel=plan.applied(config.parallel))


def free_bytes(device: torch.device) -> int:
    """A GPU's free bytes for this process: unused by all processes, or reserved by torch's allocator without use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


# --- failed plans -----------------------------------------------------------------------------------------------------


def setting_of(config: Config, world_size: int) -> dict[str, Any]:
    """The settings for which a plan's failure counts: with another batch, model or number of ranks the plan may fit."""
    train, data = config.train, config.data
    return {
        "model": asdict(config.model),
        "lora": asdict(config.lora),
        "optimizer": config.optim.optimizer,
        "seq_len": data.seq_len,
        "packing": data.packing,
        "micro_batch_size": train.micro_batch_size,
        "micro_batch_tokens": train.micro_batch_tokens,
        "precision": train.precision,
        "parallel": asdict(config.parallel),
        "world_size": world_size,
    }


@dataclass(frozen=True)
class Failures:
    """A run folder's record of plans that did not fit: their names and their setting."""

    setting: dict[str, Any]
    failed: tuple[str, ...]


def read_failed(run_dir: Path, config: Config, world_size: int) -> list[str]:
    """The plans that have failed in this run folder for the same setting."""
    try:
        noted = read_json(run_dir / MEMORY_PLAN_FILE, Failures)
    except (OSError, InvalidData):
        return []
    now = json.loads(json.dumps(setting_of(config, world_size)))
    then, _ = take_out(noted.setting, DROPPED)  # an earlier version recorded every key of its schema
    return list(noted.failed) if then == now else []
