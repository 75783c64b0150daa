"""Pretraining: which documents are trained on, in what pieces, and the run from texts to export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.reference import from_folder, save_hf
from tests.support.configs import SMALL_MODEL, config_of
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, tiny_shape
from tests.trainer.data.documents import documents_of
from tests.trainer.data.token_files import document, write
from trainer.config.load import check_config, config_notes
from trainer.data.corpus import build_corpus
from trainer.data.dataset.documents import pick_held_out
from trainer.data.loader import Data
from trainer.data.tokenize.token_file import TokenFile
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer, vocabulary_hash
from trainer.dist import Dist
from trainer.errors import ConfigError, DataError
from trainer.models.losses import sft_loss
from trainer.recipes import pretrain
from trainer.schema import Config, RunConfig

BYTES = build_bytes_tokenizer()
WORDS = ["alpha", "beta", "gamma", "delta", "omega"]


def corpus_file(path: Path, lengths: list[int], *, first: int = 0) -> str:
    """Documents of the given lengths, no two alike."""
    docs = [document((first + n + np.arange(length)) % 250, name=f"{first + n}") for n, length in enumerate(lengths)]
    write(path, docs, vocab_size=260, tokenizer=vocabulary_hash(BYTES))
    return str(path)


def pretraining_on(*sources: Any, data: dict[str, Any] | None = None, **train: Any) -> Config:
    return config_of(
        recipe="pretrain",
        model=SMALL_MODEL,
        data={"train": list(sources), "eval_fraction": 0.0, "seq_len": 16, **(data or {})},
        optim={"learning_rate": 1e-2, "warmup_steps": 2},
        train={"steps": None, "epochs": 1, "save_every": 0, **train},
    )


def load(config: Config, tmp_path: Path, *, vocab_size: int = 260) -> Data:
    return build_corpus(config, ALONE, BYTES, run_dir=tmp_path / "run", model_vocab=vocab_size)


def epoch(data: Data) -> list[str]:
    """The names of all pieces that the run's steps hold, in order."""
    steps = range(data.train.total_steps)
    return documents_of(data.train, steps)


def whole_documents(names: list[str]) -> set[str]:
    return {name.partition("[")[0] for name in names}


# --- tokens and targets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_has_every_token_but_a_documents_first_as_a_target_once(tmp_path, packing):
    lengths = [1, 2, 16, 17, 40, 5, 3, 31]
    data = load(pretraining_on(corpus_file(tmp_path / "a.tokens", lengths), data={"packing": packing}), tmp_path)
    batches = [batch for step in range(data.train.total_steps) for batch in data.train.step_batches(step)]
    assert sum(int(batch.num_targets) for batch in batches) == sum(length - 1 for length in lengths)
    report = data.report.train
    assert report.target_tokens == sum(length - 1 for length in lengths)
    assert report.tokens == sum(int(batch.num_tokens) for batch in batches)
    assert report.dropped == {"no target token": ["0"]}


def test_an_epoch_has_the_loss_of_transformers_on_each_piece_alone(tmp_path):
    lengths = [16, 9, 25, 3, 7, 40]
    shape = tiny_shape(vocab_size=260)
    theirs = save_hf(shape, tmp_path / "model")
    ours = from_folder(tmp_path / "model", shape)
    path = corpus_file(tmp_path / "a.tokens", lengths)
    pieces = [doc.ids[start : start + 16] for doc in TokenFile.open(path) for start in range(0, len(doc.ids) - 1, 15)]
    batches = [torch.tensor([ids.tolist()]) for ids in pieces]
    train = load(pretraining_on(path), tmp_path).train
    with torch.no_grad():
        want = sum(float(theirs(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in batches)
        got = [sft_loss(ours, batch) for step in range(train.total_steps) for batch in train.step_batches(step)]
    assert sum(float(loss.total) for loss in got) == pytest.approx(want, rel=1e-5)


def test_report_has_documents_tokens_and_padding(tmp_path):
    data = load(pretraining_on(corpus_file(tmp_path / "a.tokens", [16, 10, 6])), tmp_path)
    assert data.report.render()[0] == "train: 3 of 3 documents, 32 tokens (29 targets) in 2 rows, 0.0% padding"


def test_unpacked_pieces_are_padded_to_their_micro_batch_alone(tmp_path):
    settings = {"packing": False, "seq_len": 64}
    config = pretraining_on(corpus_file(tmp_path / "a.tokens", [64, 9, 9, 9]), data=settings, micro_batch_size=1)
    assert load(config, tmp_path).report.train.padding_share == 1 - 91 / (64 + 3 * 16)


# --- which documents --------------------------------------------------------------------------------------------------


def test_sources_are_mixed_by_weight(tmp_path):
    many = corpus_file(tmp_path / "many.tokens", [8] * 30)
    few = corpus_file(tmp_path / "few.tokens", [8] * 10, first=100)
    data = load(pretraining_on({"path": many, "weight": 1.0}, {"path": few, "weight": 3.0}), tmp_path)
    names = epoch(data)
    assert len(names) == 40
    assert sum(int(name) >= 100 for name in names) == 30


def test_limit_and_repeat_of_a_source(tmp_path):
    one = corpus_file(tmp_path / "one.tokens", [8] * 10)
    two = corpus_file(tmp_path / "two.tokens", [8] * 10, first=100)
    names = epoch(load(pretraining_on({"path": one, "limit": 3}, {"path": two, "repeat": 2.5}), tmp_path))
    assert sorted(name for name in names if int(name) < 100) == ["0", "1", "2"]
    counts = {names.count(str(100 + n)) for n in range(10)}
    assert (sum(int(name) >= 100 for name in names), counts) == (25, {2, 3})


def test_max_train_rows_counts_documents(tmp_path):
    path = corpus_file(tmp_path / "a.tokens", [40] * 9)
    names = epoch(load(pretraining_on(path, data={"max_train_rows": 4}), tmp_path))
    assert whole_documents(names) == {"0", "1", "2", "3"}


def test_held_out_documents_are_whole_and_not_trained_on(tmp_path):
    config = pretraining_on(corpus_file(tmp_path / "a.tokens", [40] * 20), data={"eval_fraction": 0.2})
    data = load(config, tmp_path)
    assert (data.report.train.rows_read, data.report.eval.rows_read) == (16, 4)
    assert len(whole_documents(epoch(data))) == 16
    assert sum(int(batch.num_targets) for batch in data.eval.batches()) == 4 * 39


def test_copies_of_a_document_are_held_out_together():
    keys = np.array([5, 1, 5, 9, 1, 5], dtype=np.uint64)
    assert pick_held_out(keys, 0.1, None).tolist() == [False, True, False, False, True, False]
    assert pick_held_out(keys, 0.5, None).tolist() == [True, True, True, False, True, True]
    assert not pick_held_out(np.array([7, 7], dtype=np.uint64), 0.5, None).any()


def test_own_evaluation_data_is_read_up_to_its_limit(tmp_path):
    train, held_out = (corpus_file(tmp_path / f"{n}.tokens", [8] * 9, first=n) for n in (0, 100))
    data = load(pretraining_on(train, data={"eval": [held_out], "max_eval_rows": 5}), tmp_path)
    assert (data.report.train.rows_read, data.report.eval.rows_read) == (9, 5)


def test_evaluation_documents_that_are_trained_on_are_called_documents(tmp_path):
    path = corpus_file(tmp_path / "a.tokens", [8] * 9)
    (note,) = load(pretraining_on(path, data={"eval": [path]}), tmp_path).report.notes
    assert note.startswith("warning: 9 of 9 held-out documents are word for word in the training data too")


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_token_file_of_another_tokenizer_is_refused(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, [document([1, 2])], vocab_size=260, tokenizer="another")
    with pytest.raises(DataError, match="made with another tokenizer: another of 260 tokens"):
        load(pretraining_on(str(path)), tmp_path)


def test_token_file_that_is_written_over_during_the_run_is_an_error(tmp_path):
    path = Path(corpus_file(tmp_path / "a.tokens", [16] * 9))
    train = load(pretraining_on(str(path), global_batch_size=1), tmp_path).train
    train.step_batches(0)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match="has changed while it was read"):
        for step in range(1, 9):
            train.step_batches(step)


def test_token_file_with_an_id_that_the_model_lacks_is_refused(tmp_path):
    path = corpus_file(tmp_path / "a.tokens", [8, 9])
    with pytest.raises(DataError, match=r"document 0 \(0\) holds id 7 at token 7"):
        load(pretraining_on(path), tmp_path, vocab_size=7)


def test_files_without_a_token_to_predict_are_refused(tmp_path):
    with pytest.raises(DataError, match="none of the 2 documents has a token to predict"):
        load(pretraining_on(corpus_file(tmp_path / "a.tokens", [1, 0])), tmp_path)


def test_plain_text_is_refused_where_conversations_are_trained_on():
    config = replace(pretraining_on("corpus.tokens"), recipe="sft")
    with pytest.raises(ConfigError, match=r"names corpus\.tokens, which has no conversations, and the recipe is sft"):
        check_config(config)


def test_keys_of_conversations_have_no_effect_on_pretraining():
    settings = {"loss_on": "all", "overlong": "drop", "system_prompt": "x", "workers": 2}
    notes = config_notes(pretraining_on("corpus.tokens", data=settings), backend="ddp", deployed=True)
    named = "\n".join(notes)
    assert all(f"data.{key}" in named for key in settings)


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path) -> Path:
    """Forty small files of a few words each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    random = np.random.RandomState(0)
    for number in range(40):
        words = " ".join(random.choice(WORDS, 4 + number % 30))
        (folder / f"{number:02}.txt").write_text(f"{number} {words}")
    return folder


def test_texts_are_tokenized_into_the_run_folder_once(texts, tmp_path):
    config = pretraining_on(str(texts))
    first = load(config, tmp_path).train.fingerprint()
    [path] = (tmp_path / "run" / "tokens").iterdir()
    made = path.stat().st_mtime_ns
    assert load(config, tmp_path).train.fingerprint() == first
    assert path.stat().st_mtime_ns == made


def test_changed_texts_are_tokenized_again(texts, tmp_path):
    config = pretraining_on(str(texts))
    before = load(config, tmp_path).train.fingerprint()
    (texts / "new.txt").write_text("epsilon")
    assert load(config, tmp_path).train.fingerprint() != before


def train_rank(dist: Dist, config: Config, run_dir: str) -> None:
    Path(run_dir).mkdir(exist_ok=True)
    assert pretrain.run(config, Path(run_dir), dist) == 0


def losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_pretraining_learns_and_is_the_same_on_two_ranks_and_after_a_resume(texts, tmp_path):
    settings = {"seq_len": 64, "eval_fraction": 0.1}
    config = pretraining_on(str(texts), data=settings, steps=10, epochs=None, global_batch_size=6)
    run_ranks(train_rank, 2, replace(config, run=RunConfig(export=False)), str(tmp_path / "two"))
    half = replace(config, train=replace(config.train, stop_after_steps=5))
    for step in (half, config):
        train_rank(ALONE, step, str(tmp_path / "one"))
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-4)
    outcome = json.loads((tmp_path / "one" / "outcome.json").read_text())
    assert outcome["state"] == "succeeded"
    assert outcome["eval_loss_last"] < 0.9 * outcome["eval_loss_first"]
    assert (tmp_path / "one" / "export" / "model.safetensors").is_file()
