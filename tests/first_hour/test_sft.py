"""`sft`: a fine-tune without a config file, and what the config names travels though git ignores it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deployer.commands.launch.cli import sft
from deployer.commands.launch.sft import make_config
from deployer.errors import UsageError
from deployer.plan.env_file import env_file_of
from deployer.plan.options import Options, read_config
from deployer.plan.prepare import Prepared, _scan_wheels, prepare
from tests.first_hour.models import write_model
from tests.support.ferry import Ferry
from trainer.config.load import load_config
from trainer.schema.first_config import render

ROW = {"messages": [{"role": "user", "content": "how?"}, {"role": "assistant", "content": "so"}]}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, and a model's folder, which git ignores in part."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "my.jsonl").write_text((json.dumps(ROW) + "\n") * 8)
    (folder / ".gitignore").write_text("data/\n*.safetensors\n")
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(folder)
    return folder


def fake_model(folder: Path) -> str:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return str(folder)


def made(*overrides: str, kind: str = "sft", model: str | None = "a/b", data: tuple[str, ...] = ("data/my.jsonl",)):
    return make_config(kind, model=model, data=data, overrides=overrides, program="torchferry", file=None)


def prepared(*overrides: str, include: tuple[str, ...] = (), **how: object) -> Prepared:
    config = made(*overrides, **how)
    options = Options(config=config.name, text=config.text, overrides=overrides, include=include)
    return prepare(read_config(options), options=options, project=Path.cwd())


# --- the whole way ----------------------------------------------------------------------------------------------------


def test_fine_tune_without_a_file_trains_an_ignored_model_on_ignored_data(ferry: Ferry) -> None:
    write_model(ferry.project / "models" / "tiny")
    (ferry.project / "data").mkdir()
    ferry.write("data/my.jsonl", (json.dumps(ROW) + "\n") * 8)
    ferry.write(".gitignore", "data/\nmodels/\n")
    words = ("sft", "--model", "models/tiny", "--data", "data/my.jsonl", "--lora", "--device", "cpu", "-o", "mine.yaml")
    keys = ("train.steps=2", "train.micro_batch_size=2", "data.seq_len=64", "data.eval_fraction=0", "lora.rank=2")
    done = ferry.run(*words, *keys, *ferry.where(), "--python", sys.executable)
    told = done.stderr.decode()
    assert done.returncode == 0, told
    assert "  model:\n    name: models/tiny" in told.replace("  # a Hugging", "\n") and "train.steps=2\n" in told
    assert "the config names data/my.jsonl (" in told and "models/tiny (" in told
    (results,) = (ferry.project / "results").iterdir()
    kept = load_config(results / "config.yaml")
    assert (kept.train.steps, kept.train.epochs, kept.lora.rank, kept.model.name) == (2, None, 2, "models/tiny")
    assert (results / "export" / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((results / "outcome.json").read_text())["steps"] == 2
    again = ferry.run("mine.yaml", *keys, "target.device=cpu", *ferry.where(), "--dry-run")
    assert again.returncode == 0 and b"# include  models/tiny\n" in again.stdout, again.stderr.decode()


def test_config_is_that_of_init_and_printed_alone_where_asked(ferry: Ferry) -> None:
    ferry.write("my.jsonl", json.dumps(ROW) + "\n")
    words = ("--model", "a/b", "--data", "my.jsonl")
    printed = ferry.run("sft", *words, "--lora", "--print")
    assert printed.returncode == 0 and printed.stderr == b"" and ferry.job_ids() == []
    theirs = render("lora", "lora.yaml", model="a/b", data="my.jsonl").splitlines()[2:]
    assert printed.stdout.decode().splitlines()[2:] == theirs
    shown = ferry.run("pretrain", *words, "--dry-run", "--ssh", "nobody@h")
    assert "#   recipe: pretrain\n" in shown.stdout.decode() and "# job      pretrain-" in shown.stdout.decode()
    as_json = ferry.run("sft", *words, "--dry-run", "--json", "--ssh", "nobody@h")
    assert json.loads(as_json.stdout)["plan"]["name"] == "sft" and b"  recipe: sft\n" in as_json.stderr


# --- what is refused before anything is asked of a host ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message", "hint"),
    [
        ({"data": ("data/mi.jsonl",)}, "--data data/mi.jsonl: no such file", "did you mean data/my.jsonl?"),
        ({"data": ("datas",)}, "--data datas: no such file", "did you mean data?"),
        ({"data": ()}, "--data is missing", "my.jsonl"),
        ({"model": None}, "--model is missing", "Qwen/"),
        ({"model": "./gone"}, "--model ./gone: no such folder", "user/name"),
        ({"model": "data"}, "--model data has no config.json", "safetensors"),
        ({"model": "data/my.jsonl"}, "--model data/my.jsonl is a file", "config.json: data"),
        ({"model": "lora", "kind": "lora"}, "--model lora is an adapter", "without --lora: --model BASE lora.adapter="),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest_name(project, how, message, hint) -> None:
    (project / "lora").mkdir()
    (project / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=message) as caught:
        made(**how)
    assert hint in caught.value.hint


def test_word_that_is_no_key_is_told(project: Path) -> None:
    with pytest.raises(UsageError, match=r"takes options and KEY=VALUE, not 'my\.jsonl'"):
        made("my.jsonl")


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--epochs", "did you mean: deploy.py sft --data a train.epochs=3"),
        ("--lora-rank", "did you mean: deploy.py sft --data a lora.rank=3"),
        ("--host", "did you mean: deploy.py sft --data a --ssh 3"),
        ("--qqq", "KEY=VALUE sets a key of the config; deploy.py keys WORD finds it"),
    ],
)
def test_option_that_is_a_key_is_told_as_one(option: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"(?i)no such option.*{option}") as caught:
        sft.make_context("sft", ["--data", "a", option, "3"])
    assert caught.value.hint == hint


def test_absolute_path_into_the_project_travels(project: Path) -> None:
    model = fake_model(project / "models" / "m")
    text = made(model=model, data=(str(project / "data" / "my.jsonl"),)).text
    assert "name: models/m " in text and "train: [data/my.jsonl]" in text
    assert (
        made(data=("/far/rows.jsonl", "user/set", "builtin:stdlib-docs")).text.count("/far/rows.jsonl, user/set, ") == 1
    )


@pytest.mark.parametrize(
    ("name", "content", "where", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n', "a.jsonl:1", "no known schema has the keys 'text'"),
        ("a.jsonl", json.dumps(ROW) + '\n\n{"x": 1}\n', "a.jsonl:3", "no known schema has the keys 'x'"),
        ("a.jsonl", json.dumps(ROW) + "\n{'x': 1}\n", "a.jsonl:2", "not JSON: "),
        ("a.jsonl", "[1]\n", "a.jsonl[0]", "not an object"),
        ("a.json", json.dumps([{"x": 1}], indent=1), r"a.json[0]", "the keys 'x'"),
        ("a.csv", "Question;Answer\na;b\n", "a.csv:1", "the keys 'Question', 'Answer'"),
        ("a.jsonl", "\n", "", "a.jsonl has no rows"),
    ],
)
def test_rows_that_no_schema_fits_are_told_before_anything_travels(project, name, content, where, message) -> None:
    (project / name).write_text(content)
    with pytest.raises(UsageError) as caught:
        prepared(data=(name,))
    assert message in caught.value.message and caught.value.where == ((where,) if where else ())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps({"train": [ROW], "test": [ROW]})),
        ("a.json", json.dumps(ROW, indent=1) * 2),
        ("a.tsv", "prompt\tcompletion\na\tb\n"),
        ("a.parquet", "PAR1"),
        ("a.jsonl", "\ufeff" + json.dumps(ROW)),
    ],
)
def test_files_that_the_trainer_reads_are_let_pass(project, name, content) -> None:
    (project / name).write_text(content)
    assert prepared(data=(name,)).plan.name == "sft"


def test_schema_of_the_config_is_what_rows_are_held_to(project: Path) -> None:
    with pytest.raises(UsageError, match="the row has no 'question' and no 'answer'"):
        prepared("data.schema=question_answer")


# --- what the config names travels ------------------------------------------------------------------------------------


def included(done: Prepared) -> list[str]:
    return [include.path for include in done.plan.includes]


def test_ignored_paths_that_the_config_names_travel_and_are_said_with_their_size(project: Path) -> None:
    fake_model(project / "models" / "m")
    fake_model(project / "results" / "old" / "export")
    keys = ("data.eval=[data/my.jsonl]", "data.tokenizer=results/old/export")
    done = prepared(*keys, model="models/m")
    assert included(done) == ["data/my.jsonl", "models/m/model.safetensors", "results/old/export"]
    assert dict(done.named) == {
        "data/my.jsonl": 8 * len(json.dumps(ROW) + "\n"),
        **dict.fromkeys(included(done)[1:2], 2),
        "results/old/export": 4,
    }
    assert "code/models/m/config.json" in {entry.path for entry in done.code.entries}
    assert included(prepared(model="models/m", include=("models",))) == ["models", "data/my.jsonl"]


def test_link_out_of_the_project_comes_as_what_it_leads_to_where_the_user_includes_it(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (project / "far").symlink_to(tmp_path / "far")
    (project / "rows.jsonl").symlink_to(tmp_path / "far" / "rows.jsonl")
    names = ("far/rows.jsonl", "rows.jsonl")
    for how in ({"data": names[:1]}, {"data": names[1:]}, {"overrides": ["files=[rows.jsonl]"]}):
        with pytest.raises(UsageError, match=r"rows\.jsonl is a link out of the project, to .*far/rows") as caught:
            prepared(*how.pop("overrides", ()), **how)
        assert caught.value.hint.endswith("rows.jsonl sends what it leads to") and "--include" in caught.value.hint
    done = prepared(data=names, include=names)
    assert included(done) == list(names)
    paths = {entry.path for tree in done.shipment.trees.values() for entry in tree}
    assert "code/far" not in paths and "code/rows.jsonl" not in paths and "rows.jsonl" in paths


def shipped(done: Prepared) -> set[str]:
    """The paths in the project of what travels, but for the trainer."""
    code = {entry.path.removeprefix("code/") for entry in done.code.entries}
    trees = done.shipment.trees
    return code | {
        include.path if include.file else f"{include.path}/{entry.path}"
        for include in done.plan.includes
        for entry in trees[include.tree]
    }


def test_secrets_beside_named_data_stay_here(project: Path) -> None:
    for name in ("src/keys/id_rsa", "src/keys/my.pem", "src/.env", "src/main.py", "data/m/.env", "data/m/.ssh/config"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("A=b\n")
    for name in ("src/keys/rows.jsonl", "src/notes.txt", "data/m/a.txt", "data/m/b.vars", "data/m/venv/pyvenv.cfg"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("B=c\n")
    (project / ".gitignore").write_text("data/\nkeys/\n.env\nnotes.txt\n")
    keys = ("recipe=pretrain", "target.env_file=data/m/b.vars")
    done = prepared(*keys, kind="pretrain", model=None, data=("src", "data/m"))
    named = {"src/main.py", "src/notes.txt", "src/keys/rows.jsonl", "data/m/a.txt"}
    assert shipped(done) == {".gitignore", *named}
    for number in range(60):  # too many to go one by one
        (project / "src" / f"{number}.md").write_text(str(number))
    (project / "src" / "kept.vars").write_text("x")
    (project / ".gitignore").write_text("data/\nkeys/\n.env\n*.txt\n*.md\n")
    done = prepared("recipe=pretrain", "target.env_file=src/.env", kind="pretrain", model=None, data=("src",))
    few = {path for path in shipped(done) if not path.endswith(".md")}
    assert few == {".gitignore", "src/main.py", "src/notes.txt", "src/keys/rows.jsonl", "src/kept.vars"}
    assert included(done) == ["src"] and len(shipped(done)) == len(few) + 60
    asked = prepared("recipe=pretrain", kind="pretrain", model=None, data=("data/m",), include=("data/m/.ssh",))
    assert "data/m/.ssh/config" in shipped(asked) and "data/m/.env" not in shipped(asked)


def test_packages_of_a_wheels_folder_go_and_nothing_else(project: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "far", project / "wheels"):
        (folder / "deeper").mkdir(parents=True)
        for name in ("a-1-py3-none-any.whl", "b-1.tar.gz", "id_ed25519", "deeper/c.whl"):
            (folder / name).write_text(name)
    for named in ("wheels", str(tmp_path / "far")):
        scan = _scan_wheels(named, project)
        assert [entry.path for entry in scan.entries] == ["a-1-py3-none-any.whl", "b-1.tar.gz"]
    (project / "wheels" / "d.whl").symlink_to(tmp_path / "far" / "id_ed25519")
    with pytest.raises(UsageError, match=r"--wheels wheels has a link out of the project: d\.whl"):
        _scan_wheels("wheels", project)


def test_env_file_of_another_folder_than_the_present_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "a.env").write_text("A=b\n")
    monkeypatch.chdir(tmp_path)
    found = env_file_of("a.env", project)
    assert found is not None and found.variables == {"A": "b"}
    assert found.kept_path == str(project / "a.env") and found.paths_below(project) == ["a.env"]


@pytest.mark.parametrize(
    ("data", "env_file", "message"),
    [
        (".env", "", "\\.env is called as what should not leave by accident"),
        ("link", "", "link is called as what should not leave"),
        ("data/x.vars", "target.env_file=data/x.vars", "names data/x.vars, which is the env file"),
        ("data/in", "", "data/in/far is a link out of the project, to "),
    ],
)
def test_secrets_that_a_config_names_stay_here(project, tmp_path, data, env_file, message) -> None:
    (project / "data" / "in").mkdir()
    for name in (".env", "data/x.vars"):
        (project / name).write_text("A=b\n")
    (tmp_path / "far.txt").write_text("far")
    (project / "data" / "in" / "far").symlink_to(tmp_path / "far.txt")
    (project / "link").symlink_to(".env")
    keys = [env_file] if env_file else []
    with pytest.raises(UsageError, match=message):
        prepared(*keys, kind="pretrain", model=None, data=(data,))


def test_what_deployignore_leaves_out_is_refused(project: Path) -> None:
    (project / ".deployignore").write_text("data/\n")
    with pytest.raises(UsageError, match=r"data/my.jsonl is left out of what is sent \(data/ in .deployignore:1\)"):
        prepared()


def test_paths_out_of_the_project_are_named_before_anything_starts(project: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    with pytest.raises(UsageError, match=r"\.\./rows.jsonl is outside the project .* does not travel") as caught:
        prepared(data=("../rows.jsonl",))
    assert "ln -s ../rows.jsonl rows.jsonl" in caught.value.hint
    far, inside = str(tmp_path / "rows.jsonl"), str(project / "data" / "my.jsonl")
    warnings = prepared(f"data.eval=[{inside}, {far}]", "target.ssh=h").code.warnings
    assert f"{inside} does not travel under this name: the host must have it, or write data/my.jsonl" in warnings[0]
    assert f"{far} is not part of the project" in warnings[1] and f"ln -s {far} rows.jsonl" in warnings[1]
