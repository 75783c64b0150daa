"""Plans of a next attempt: the job's own request and config.yaml, whoever wrote them, with what is given now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deployer.agent.host.layout import Job
from deployer.agent.job.plan import Plan
from deployer.agent.job.progress import resumes_from
from deployer.agent.python.spec import PythonSpec
from deployer.errors import HostError, UsageError
from deployer.plan.launch_plan import Command, ConfigText, build_plan
from deployer.plan.next_attempt import Resumable, beginning, plan_next
from deployer.plan.options import Options
from trainer.config.load import config_to_yaml, known_keys
from trainer.schema import Config, RunConfig, SourceConfig, TargetConfig, TrainConfig, with_key

WHOLE = config_to_yaml(Config())


def job_of(config: Config, command: Command | None = None, text: ConfigText | None = None, **how: Any) -> Resumable:
    from_step = how.pop("from_step", None)
    if text is None and command is None:
        text = ConfigText(config_to_yaml(config), frozenset(known_keys()), given_alone=False)
    where: dict[str, Any] = {"job_id": "j-1", "created": "2026-01-01T00:00:00Z", "tree": "aa", "own_trainer": False}
    where["python"] = PythonSpec(config.target.python)
    return Resumable("j-1", build_plan(config, command=command, text=text, **{**where, **how}), 1, from_step)


def reads(text: str, *, given_alone: bool = False, from_step: int | None = None) -> Resumable:
    """A job whose trainer has this config.yaml."""
    sent = ConfigText(text, frozenset(known_keys()), given_alone=given_alone)
    return job_of(Config(), text=sent, from_step=from_step, own_trainer=given_alone)


def text_of(job: Resumable, *overrides: str, tell: Any = None, **keys: Any) -> str:
    """The config.yaml of its next attempt."""
    options = Options(overrides=overrides, keys={f"target.{name}": value for name, value in keys.items()})
    plan, _ = plan_next(job, options, known=(), **({"tell": tell} if tell else {}))
    assert plan.config_yaml is not None
    return plan.config_yaml


def refused(job: Resumable, *overrides: str, **keys: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        text_of(job, *overrides, **keys)
    return caught.value


def without(text: str, *names: str) -> str:
    """As an older schema would have dumped it."""
    return "".join(line for line in text.splitlines(True) if line.split(":")[0].strip() not in names)


# --- the text of a trainer --------------------------------------------------------------------------------------------


def test_nothing_is_given_and_no_byte_changes() -> None:
    for text in (WHOLE, without(WHOLE, "keep_every", "queue"), WHOLE + "later:\n  key: [1, 2]\n"):
        assert text_of(reads(text)) == text
        assert text_of(reads(text, from_step=30)) == text


def test_keys_that_are_given_change_and_no_others() -> None:
    job = reads(without(WHOLE, "keep_every"))
    changed = text_of(job, "train.steps=4000", "run.trackers=wandb", gpu_ranks=[0, 1], **{"env.A": "canary"})
    before, now = without(WHOLE, "keep_every").splitlines(), changed.splitlines()
    assert [(b, n) for b, n in zip(before, now, strict=True) if b != n] == [
        ("  gpu_ranks: [0]", "  gpu_ranks: [0, 1]"),
        ("  steps: 200", "  steps: 4000"),
        ("  trackers: []", "  trackers: [wandb]"),
    ]


def test_key_that_follows_from_another_changes_with_it() -> None:
    by_epochs = yaml.safe_load(text_of(reads(WHOLE), "train.epochs=2"))
    assert (by_epochs["train"]["steps"], by_epochs["train"]["epochs"]) == (None, 2.0)
    back = yaml.safe_load(text_of(reads(text_of(reads(WHOLE), "train.epochs=2")), "train.steps=9"))
    assert (back["train"]["steps"], back["train"]["epochs"]) == (9, None)


def test_beginning_elsewhere_is_behind_a_job_that_has_saved() -> None:
    text = config_to_yaml(Config(train=TrainConfig(resume="/elsewhere/step_000009")))
    assert text_of(reads(text)) == text
    assert text_of(reads(text, from_step=30)) == text.replace("/elsewhere/step_000009", "auto")
    assert text_of(reads(text, from_step=30), "train.resume=never") == text.replace("/elsewhere/step_000009", "never")
    plan, _ = plan_next(reads("{}\n", given_alone=True, from_step=30), Options(), known=())
    assert plan.config_yaml == "{}\n"  # the default: nobody gave another
    assert beginning(reads("{}\n", from_step=30), plan) == "from step 30"


def test_sources_of_data_are_written_as_plain_values() -> None:
    config = with_key(Config(), "data.train", [SourceConfig(path="builtin:stdlib-docs", weight=1.0)])
    changed = text_of(reads(config_to_yaml(config)), "data.train=[{path: 'builtin:stdlib-docs', weight: 2}]")
    (source,) = yaml.safe_load(changed)["data"]["train"]
    assert (source["path"], source["weight"]) == ("builtin:stdlib-docs", 2.0)


# --- keys that this schema has no longer, or never had ----------------------------------------------------------------

OLDER = WHOLE.replace("train:\n", "train:\n  nonfinite: abort\n  other: [a]\n").replace(
    "parallel:\n", "parallel:\n  limit_all_gathers: false\n"
) + ("later:\n  key: 1\n  deep: {a: 1}\n")
"""Of another version's trainer: dropped keys at values that this client refuses, and keys that it never heard of."""


def test_other_keys_stay_unsaid_and_untouched() -> None:
    notes: list[str] = []
    assert text_of(reads(OLDER), tell=notes.append) == OLDER
    assert text_of(reads(OLDER), "train.steps=9", tell=notes.append) == OLDER.replace("steps: 200", "steps: 9")
    assert notes == []


@pytest.mark.parametrize(
    ("override", "was", "becomes"),
    [
        ("train.nonfinite=skip", "nonfinite: abort", "nonfinite: skip"),
        ("parallel.limit_all_gathers=yes", "limit_all_gathers: false", "limit_all_gathers: true"),
        ("train.other=b, c", "other: [a]", "other: [b, c]"),
        ("train.other=[]", "other: [a]", "other: []"),
        ("later.key=1e-4", "  key: 1\n", "  key: 1e-4\n"),
        ("later.key='x: y'", "  key: 1\n", "  key: 'x: y'\n"),
        ("later.deep={a: 2}", "{a: 1}", "{a: 2}"),
    ],
)
def test_other_key_of_the_file_may_be_given(override: str, was: str, becomes: str) -> None:
    expected = OLDER.replace(was, becomes)
    assert yaml.safe_load(text_of(reads(OLDER), override)) == yaml.safe_load(expected) != yaml.safe_load(OLDER)


def test_wrong_value_of_another_key_is_refused() -> None:
    error = refused(reads(OLDER), "train.nonfinite=maybe")
    assert (error.message, error.where) == (
        "train.nonfinite is 'maybe', expected one of skip, abort",
        ("the command line",),
    )
    assert refused(reads(OLDER), "later.key={").message == "later.key is {, which is no YAML"
    assert refused(reads(OLDER), "later.keys=1").message.startswith("later.keys is not a key")


def test_dropped_key_that_the_file_lacks_is_answered_as_ever() -> None:
    notes: list[str] = []
    changed = text_of(reads(WHOLE), "train.nonfinite=abort", tell=notes.append)
    assert notes == ["train.nonfinite is abort, which is train.max_nonfinite_steps=1 now"]
    assert changed == WHOLE.replace("max_nonfinite_steps: 10", "max_nonfinite_steps: 1")
    assert "FSDP2 frees memory" in refused(reads(WHOLE), "parallel.limit_all_gathers=false").message


# --- keys that the job's trainer lacks --------------------------------------------------------------------------------


def test_key_that_the_jobs_trainer_lacks_is_refused_with_the_way_out() -> None:
    old = reads(without(WHOLE, "keep_every"))
    error = refused(old, "train.keep_every=100")
    assert error.message == (
        "the trainer of j-1 does not know train.keep_every, which is newer: the job keeps the code it came with"
    )
    assert error.hint == "launch a new job, with train.resume=… naming the checkpoint to begin with"


def test_what_the_host_carries_out_needs_no_trainer_that_knows_it() -> None:
    text = without(WHOLE, "queue", "max_restarts")
    job = reads(text)
    job = replace(job, plan=job.plan._replace(config_yaml=text))
    plan, _ = plan_next(job, Options(keys={"target.queue": True, "target.max_restarts": 2}), known=())
    assert plan.config_yaml == text
    assert plan.request.overrides == ("target.queue=true", "target.max_restarts=2")
    assert (plan.policy.queue, plan.roles[0].max_restarts) == (True, 2)
    again, _ = plan_next(Resumable("j-1", plan, 2, None), Options(), known=())
    assert again == plan
    less, _ = plan_next(Resumable("j-1", plan, 2, None), Options(overrides=("target.max_restarts=0",)), known=())
    assert less.request.overrides == ("target.queue=true",) and less.roles[0].max_restarts == 0


def test_trainer_that_was_sent_what_was_given_alone_judges_new_keys_itself() -> None:
    job = reads("train:\n  seed: 5\n", given_alone=True)
    assert text_of(job, "train.keep_every=7", "run.export=no") == (
        "train:\n  seed: 5\n  keep_every: 7\nrun:\n  export: false\n"
    )
    assert text_of(job, queue=True) == "train:\n  seed: 5\n"


def test_length_is_judged_only_where_somebody_gave_it() -> None:
    job = reads("train:\n  seed: 5\n", given_alone=True, from_step=500)
    assert text_of(job) == "train:\n  seed: 5\n"  # 200 is this client's default, not that trainer's
    assert "has saved step 500, and train.steps is 300" in refused(job, "train.steps=300").message
    assert "has saved step 500, and train.steps is 200" in refused(reads(WHOLE, from_step=500)).message


# --- values and rules of another version ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "other"),
    [
        ("schedule: cosine", "schedule: newest"),
        ("steps: 200", "steps: many"),
        ("seed: 0", "seed: -1"),
        ("train: ['builtin:stdlib-docs']", "train: [{path: a.jsonl, share: 1}]"),
        ("seq_len: 512", "seq_len: 8192"),  # more than the model has positions
    ],
)
def test_value_that_this_schema_or_its_rules_refuse_is_the_trainers_own_affair(was: str, other: str) -> None:
    text = WHOLE.replace(was, other)
    assert text != WHOLE
    assert text_of(reads(text)) == text
    assert text_of(reads(text), "train.log_every=7") == text.replace("log_every: 1", "log_every: 7")


def test_what_is_given_is_judged_by_the_rules_of_this_schema() -> None:
    too_long = WHOLE.replace("seq_len: 512", "seq_len: 8192")
    assert "data.seq_len is 9000" in refused(reads(too_long), "data.seq_len=9000").message
    assert refused(reads(WHOLE), "train.log_every=0").message == "train.log_every is 0, must be 1 or more"


@pytest.mark.parametrize("other", ["device: tpu", "device: 3", "device: []"])
def test_target_must_be_understood_for_the_client_acts_by_it(other: str) -> None:
    error = refused(reads(WHOLE.replace("device: auto", other)))
    assert error.message.startswith("target.device is") and error.where == ("config.yaml of j-1:5",)


@pytest.mark.parametrize(
    ("words", "keys", "says"),
    [
        (("target.gpu_ranks=0,0",), {}, "target.gpu_ranks is [0, 0]: it names 0 twice"),
        ((), {"gpu_ranks": [0, 0]}, "target.gpu_ranks is [0, 0]: it names 0 twice"),
        ((), {"max_restarts": -1}, "target.max_restarts is -1, must be 0 or more"),
    ],
)
def test_mistake_on_the_command_line_is_told_of_it(words: tuple[str, ...], keys: Any, says: str) -> None:
    program = job_of(Config(), Command(("true",), torchrun=False))
    for job in (reads(WHOLE), *([] if words else [program])):
        error = refused(job, *words, **keys)
        assert (error.message, error.where) == (says, ("the command line",))


@pytest.mark.parametrize("override", ["target.ssh=box", "target.root=/elsewhere"])
def test_job_stays_where_it_is(override: str) -> None:
    assert refused(reads(WHOLE), override).message.endswith("says where a job lies, and j-1 stays where it is")


@pytest.mark.parametrize("setting", ["target.queue", "target.queue={", "target.queue=1", "target.nice=3", "=1", "a=1"])
def test_request_that_is_none_is_an_error_that_names_the_job(setting: str) -> None:
    for command in (Command(("true",), torchrun=False), None):
        job = job_of(Config(), command)
        broken = job.plan._replace(request=job.plan.request._replace(overrides=(setting,)))
        with pytest.raises((UsageError, HostError)) as caught:
            plan_next(replace(job, plan=broken), Options(), known=())
        assert "j-1" in f"{caught.value.message} {caught.value.where}"


def test_plan_without_command_or_config_is_an_error_that_names_the_job() -> None:
    program, trainer = job_of(Config(), Command(("true",), torchrun=False)), reads(WHOLE)
    without_command = program.plan._replace(request=program.plan.request._replace(command=()))
    without_config = trainer.plan._replace(config_yaml=None)
    for job, plan, lack in ((program, without_command, "no command"), (trainer, without_config, "no config")):
        with pytest.raises(HostError, match=f"j-1.*{lack}"):
            plan_next(replace(job, plan=plan), Options(), known=())


# --- request -> plan -> request ---------------------------------------------------------------------------------------

GPUS = st.one_of(
    st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), st.just(["auto:2"]), st.just(["GPU-8932f937"])
)
SECONDS = st.one_of(st.none(), st.floats(0.1, 1e9))
PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5).map("/{}".format)
TARGETS = st.builds(
    TargetConfig,
    gpu_ranks=GPUS,
    device=st.sampled_from(["auto", "cuda", "cpu"]),
    python=st.one_of(st.none(), PATHS, st.just("/😀 \x7f\u2028")),
    queue=st.booleans(),
    max_restarts=st.integers(0, 5),
    max_runtime_s=SECONDS,
    stall_timeout_s=SECONDS,
    log_max_gb=st.floats(0, 100),
)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,9}", fullmatch=True)
COMMANDS = st.builds(
    Command,
    st.sampled_from([("python", "x.py", "a b"), ("x.py", "--n=é"), ("python3.11", "-u", "x.py")]),
    st.booleans(),
)


def again_of(plan: Plan) -> Plan:
    following, _ = plan_next(Resumable("j-1", plan, 1, 7), Options(), known=())
    return following


@given(TARGETS, NAMES, COMMANDS, st.booleans(), st.booleans())
def test_plan_of_a_program_comes_back_as_it_was(
    target: TargetConfig, name: str, command: Command, restrict_gpus: bool, allow_busy: bool
) -> None:
    if command.torchrun or target.device == "cpu":
        restrict_gpus = True
    if not command.torchrun and command.argv[0] == "x.py":
        command = replace(command, torchrun=True)
    target = replace(target, gpu_ranks=target.gpu_ranks if restrict_gpus else [0])
    config = Config(run=RunConfig(name=name), target=target)
    job = job_of(config, command, restrict_gpus=restrict_gpus, allow_busy=allow_busy)
    assert again_of(job.plan) == job.plan


@settings(max_examples=20)  # a whole config takes PyYAML a while
@given(TARGETS, NAMES)
def test_plan_of_a_trainer_comes_back_as_it_was(target: TargetConfig, name: str) -> None:
    job = job_of(Config(run=RunConfig(name=name), target=target))
    assert again_of(job.plan) == job.plan
    apart = frozenset(key for key in known_keys() if not key.startswith("target.m"))
    config = Config(run=RunConfig(name=name), target=target)
    alone = job_of(config, text=ConfigText(config_to_yaml(config, apart), apart, given_alone=True), own_trainer=True)
    assert again_of(alone.plan) == alone.plan


# --- the host reads the same ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "step"),
    [
        (WHOLE, (), 30),
        ("{}\n", (), 30),
        ("train:\n  seed: 5\n", ("train.log_every=2",), 30),
        (WHOLE.replace("resume: auto", "resume: /elsewhere/step_000009"), (), 30),
        (WHOLE, ("train.resume=never",), None),
        ("{}\n", ("train.resume=/elsewhere/step_000009",), None),
    ],
)
def test_host_says_the_step_that_the_next_attempt_goes_on_from(
    tmp_path: Path, text: str, overrides: tuple[str, ...], step: int | None
) -> None:
    (tmp_path / "checkpoints" / "step_000030").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000030" / "COMPLETE").touch()
    job = reads(text, given_alone=text != WHOLE, from_step=30)
    plan, _ = plan_next(job, Options(overrides=overrides), known=())
    assert resumes_from(Job(str(tmp_path)), plan, restarted=False) == step
