"""FSDP1's options and their meaning in FSDP2: for configs, for files of accelerate, and for docs/config.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.dropped import Dropped, Needs, NoEffect, Refused

WHOLE_STATE = "`torchferry export RUN --full-state FILE` writes weights and optimizer in one piece"
AHEAD = "to gather further ahead set parallel.backward_prefetch_depth=2"
PLAIN_BACKWARD = Refused("FSDP2 gathers one group ahead always", f"drop it; {AHEAD}")
LESS_THAN_FP32 = Refused("the rotary frequencies stay fp32, less loses positions", "drop it")
NO_FLAT_PARAMETER = NoEffect(", FSDP2 has no flat parameter and the mathematics is the same")


@dataclass(frozen=True)
class Strategy:
    """An FSDP1 sharding strategy in terms of FSDP2."""

    meaning: str
    replicated: bool = False
    """As in DDP."""
    hybrid: bool = False
    """Sharded within each of `dp_replicate` replicas."""
    keeps: bool = False
    """Gathered parameters are kept until the backward."""


STRATEGIES = {
    "FULL_SHARD": Strategy("gathered parameters are freed after a group's forward"),
    "SHARD_GRAD_OP": Strategy("they are kept until the step's last backward", keeps=True),
    "NO_SHARD": Strategy("ddp: every rank holds everything", replicated=True),
    "HYBRID_SHARD": Strategy("FULL_SHARD within each of `parallel.dp_replicate` replicas", hybrid=True),
    "_HYBRID_SHARD_ZERO2": Strategy("SHARD_GRAD_OP within each of them", hybrid=True, keeps=True),
}
"""In FSDP1's order: files of accelerate before 0.22 give a strategy by its number."""


@dataclass(frozen=True)
class Word:
    """An option or a value. `answer`: the meaning of a key; or, for a word that is not a key, the effect of each
    value."""

    word: str
    answer: str | Dropped
    elsewhere: tuple[str, ...] = ()
    """Other names of a word that is not a key; a key's other names are in the schema."""


WORDS = (
    Word(
        "backward_prefetch",
        Dropped(
            Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "NONE"] | None,
            None,
            {
                "BACKWARD_PRE": NoEffect(", it is built in: the backward gathers one group ahead always"),
                "BACKWARD_POST": Refused(
                    "FSDP2 has none, and FSDP1's was wrong for nested modules",
                    f"drop it: BACKWARD_PRE is built in; {AHEAD}",
                ),
                "NO_PREFETCH": PLAIN_BACKWARD,
                "NONE": PLAIN_BACKWARD,
            },
        ),
        ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"),
    ),
    Word("forward_prefetch", "true: one group is gathered ahead; a number: that many"),
    Word(
        "limit_all_gathers",
        Dropped(
            bool | None,
            None,
            {
                True: NoEffect(", it is built in: FSDP2 frees memory in a fixed order"),
                False: Refused(
                    "FSDP2 frees memory in a fixed order and has no such choice",
                    "drop it; to gather further ahead set parallel.forward_prefetch and backward_prefetch_depth",
                ),
            },
        ),
        ("fsdp_limit_all_gathers",),
    ),
    Word(
        "use_orig_params",
        Dropped(bool | None, None, {True: NO_FLAT_PARAMETER, False: NO_FLAT_PARAMETER}),
        ("fsdp_use_orig_params",),
    ),
    Word(
        "auto_wrap_policy",
        "`parallel.wrap_policy`: transformer, size with `min_num_params`, or classes with `wrap_classes`",
    ),
    Word("CPUOffload", "`parallel.cpu_offload`"),
    Word("sync_module_states", "true: rank 0 reads the weights and sends them; false: every rank reads its own share"),
    Word("ignored_modules", "`parallel.ignored_modules`: patterns of names, not modules"),
    Word("MixedPrecision", "param_dtype: `train.precision`; reduce_dtype: `parallel.reduce_dtype`"),
    Word(
        "buffer_dtype",
        Dropped(Literal["fp32", "bf16", "fp16"], "fp32", {"bf16": LESS_THAN_FP32, "fp16": LESS_THAN_FP32}),
        ("MixedPrecision.buffer_dtype",),
    ),
    Word(
        "state_dict_type",
        Dropped(
            Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"],
            "SHARDED_STATE_DICT",
            {
                "FULL_STATE_DICT": NoEffect(
                    " on checkpoints, which are sharded always: the export has all weights (of LoRA the adapter), "
                    + WHOLE_STATE,
                    Needs(
                        "run.export",
                        True,
                        "all weights in one piece",
                        f"set run.export=true, which writes them, or drop state_dict_type: {WHOLE_STATE}",
                    ),
                ),
                "LOCAL_STATE_DICT": Refused(
                    "it loads at one number of ranks only, and FSDP2 has none", "use SHARDED_STATE_DICT"
                ),
            },
        ),
        ("fsdp_state_dict_type", "StateDictType"),
    ),
    Word("fsdp_cpu_ram_efficient_loading", "no effect, every rank reads only its own share of the weights"),
    Word("fsdp_version", "1: FSDP2 runs it, with these meanings"),
)

DROPPED_WORDS = {f"parallel.{word.word}": word.answer for word in WORDS if isinstance(word.answer, Dropped)}
ACCELERATE_NAMES = {
    name: f"parallel.{word.word}" for word in WORDS for name in word.elsewhere if name.startswith("fsdp_")
}
"""accelerate's name -> our former key."""


def render_words() -> list[str]:
    """The rows of the page: word, meaning, other names."""
    words = [*(Word(name, strategy.meaning) for name, strategy in STRATEGIES.items()), *WORDS]
    return [f"| {' | '.join(_cells(word))} |" for word in words]


def _cells(word: Word) -> tuple[str, str, str]:
    meaning = word.answer if isinstance(word.answer, str) else word.answer.render()
    return word.word, meaning, ", ".join(f"`{name}`" for name in word.elsewhere)
