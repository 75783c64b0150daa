"""Batches are a function of the step: no rank, micro-batch or restart changes which rows a step has."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.oracles.reference import from_folder, save_hf
from tests.support.tiny import ALONE, tiny_shape
from tests.trainer.data.documents import ONE, Rank, documents_of
from trainer.batch import Batch
from trainer.data.dataset.documents import Documents, read_rows
from trainer.data.dataset.order import Mixture
from trainer.data.dataset.report import SplitReport
from trainer.data.dataset.store import ListStore, Selection
from trainer.data.loader import Data, EvalSet, TrainLoader, build_data
from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.encode import RowEncoder
from trainer.data.tokenize.tokenizer import load_tokenizer
from trainer.errors import DataError
from trainer.models.losses import sft_loss
from trainer.schema import Config, DataConfig, TrainConfig


@pytest.fixture
def rows_file(tmp_path):
    """30 questions and answers in the form of GSM8K, of lengths from about 55 to 230 bytes."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"What is {n} plus {n}?" + " Think." * (n % 9), "answer": f"{n}+{n}=<<{2 * n}>>" * (1 + n % 5)}
        for n in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_config(rows_file: str, *, data: dict | None = None, **train) -> Config:
    settings = {"train": [rows_file], "eval_fraction": 0.1, "seq_len": 256} | (data or {})
    return Config(data=DataConfig(**settings), train=TrainConfig(**({"micro_batch_size": 2} | train)))


def load(config: Config, rank: Rank = ONE) -> Data:
    return build_data(config, rank, load_tokenizer(config))


def real_rows(batches: list[Batch]) -> Counter:
    """Each row that holds documents, as the bytes of all that the model gets, padding left out."""
    found = Counter()
    for batch in batches:
        for tensors in zip(batch.input_ids, batch.labels, batch.positions, batch.doc_ids, strict=True):
            if (tensors[3] >= 0).any():
                found[torch.stack(tensors)[:, tensors[3] >= 0].numpy().tobytes()] += 1
    return found


def num_targets(batches: list[Batch]) -> int:
    return sum(int(batch.num_targets) for batch in batches)


def test_rows_of_a_step_are_micro_batch_size_times_grad_accum_steps_on_every_rank(rows_file):
    config = make_config(rows_file, data={"packing": False}, micro_batch_size=2, grad_accum_steps=3)
    data = [load(config, Rank(rank, 2)).train for rank in (0, 1)]
    assert [train.global_batch_size for train in data] == [12, 12]
    assert [sum(real_rows(train.step_batches(0)).values()) for train in data] == [6, 6]
    assert len(data[0].step_batches(0)) == 3


def test_data_sets_are_read_from_the_configured_splits(tmp_path):
    for split, answer in (("dev", "b"), ("validation", "c"), ("train", "d"), ("test", "e")):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "a", "answer": answer}) + "\n")
    folder = str(tmp_path)
    data = DataConfig(train=[folder], eval=[folder], train_split="train", eval_split="validation")
    assert [row.messages[-1]["content"] for _, row in read_rows(Config(data=data))] == ["d", "c", "b"]
    swapped = replace(data, train_split="test", eval_split="train")
    assert [row.messages[-1]["content"] for _, row in read_rows(Config(data=swapped))] == ["e", "d"]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("global_batch_size", [5, 7])
def test_ranks_and_micro_batches_divide_the_rows_of_a_step(rows_file, packing, global_batch_size):
    base = make_config(rows_file, data={"packing": packing}, global_batch_size=global_batch_size, micro_batch_size=1)
    expected = [real_rows(load(base).train.step_batches(step)) for step in range(6)]
    assert all(rows.total() == global_batch_size for rows in expected)
    for world_size in (1, 2, 3, 4):
        for micro in (1, 2, 4):
            config = replace(base, train=replace(base.train, micro_batch_size=micro))
            ranks = [load(config, Rank(rank, world_size)).train for rank in range(world_size)]
            for step, rows in enumerate(expected):
                parts = [rank.step_batches(step) for rank in ranks]
                assert len({len(part) for part in parts}) == 1
                shapes = {batch.input_ids.shape for part in parts for batch in part}
                assert {rows for rows, _ in shapes} == {micro}
                assert not packing or {length for _, length in shapes} == {256}
                assert sum((real_rows(part) for part in parts), Counter()) == rows


@pytest.mark.parametrize("streaming", [False, True])
def test_token_budget_bounds_micro_batches_and_changes_no_row_of_a_step(rows_file, streaming):
    data = {"packing": False, "streaming": streaming}
    base = make_config(rows_file, data=data, global_batch_size=11)
    budget = replace(base, train=replace(base.train, micro_batch_tokens=512))
    for world_size in (1, 2, 3):
        ranks = [load(budget, Rank(rank, world_size)).train for rank in range(world_size)]
        for step in (0, 3):
            parts = [rank.step_batches(step) for rank in ranks]
            assert len({len(part) for part in parts}) == 1
            assert max(batch.input_ids.numel() for part in parts for batch in part) <= 512
            found = sum((real_rows(part) for part in parts), Counter())
            assert found == real_rows(load(base).train.step_batches(step))


def test_one_epoch_has_every_conversation_once(rows_file):
    train = load(make_config(rows_file, steps=None, epochs=1.0, global_batch_size=4)).train
    ids = documents_of(train, range(train.total_steps))
    assert len(ids) == 27  # of 30, a tenth is held out
    assert len(set(ids)) == 27
    assert train.total_steps == -(-train.steps_per_epoch // 1)


def test_epoch_counts_are_exact_over_all_steps(rows_file):
    data = load(make_config(rows_file, steps=None, epochs=2.0, global_batch_size=4))
    batches = [batch for step in range(data.train.total_steps) for batch in data.train.step_batches(step)]
    assert num_targets(batches) == 2 * data.report.train.target_tokens
    assert sum(int(batch.num_tokens) for batch in batches) == 2 * data.report.train.tokens


def test_rows_left_over_by_an_epoch_begin_the_next_one_in_the_same_step(rows_file):
    config = make_config(
        rows_file, data={"packing": False, "shuffle": False, "eval_fraction": 0.0}, global_batch_size=8
    )
    train = load(config).train
    names = [name.rpartition(":")[2] for name in documents_of(train, [3])]
    assert names == ["25", "26", "27", "28", "29", "30", "1", "2"]
    assert train.epoch_at(3) == 24 / 30
    assert train.epoch_at(4) == 1 + 2 / 30


def test_epochs_have_different_orders_of_the_same_conversations(rows_file):
    train = load(make_config(rows_file, data={"packing": False}, global_batch_size=27)).train
    first, second = (documents_of(train, [step]) for step in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


def test_order_changes_with_the_seed_only(rows_file):
    orders = [
        documents_of(load(make_config(rows_file, seed=seed, global_batch_size=9)).train, [0]) for seed in (3, 3, 4)
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_steps_can_be_asked_for_in_any_order(rows_file):
    train = load(make_config(rows_file)).train
    ahead = [real_rows(train.step_batches(step)) for step in range(5)]
    again = [real_rows(train.step_batches(step)) for step in (4, 0, 3, 1, 2)]
    assert [ahead[step] for step in (4, 0, 3, 1, 2)] == again


def test_resume_within_the_second_epoch_goes_on_with_its_next_row(rows_file):
    config = make_config(rows_file, data={"packing": False}, global_batch_size=6)
    whole = load(config).train
    expected = documents_of(whole, range(6, 12))
    assert 1 < whole.epoch_at(6) < 2
    resumed = load(config).train
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict(6))))
    assert documents_of(resumed, range(6, 12)) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resume_on_other_ranks_goes_on_with_the_next_row(rows_file, world_size):
    # no global_batch_size: a step has 2 rows per rank, so the steps are others after the restart
    config = make_config(rows_file, data={"packing": False})  # a row is a conversation
    names = documents_of(load(config).train, range(16))
    state = load(config, Rank(0, 2)).train.state_dict(2)
    resumed = load(config, Rank(0, world_size)).train
    resumed.load_state_dict(state)
    after = documents_of(resumed, range(2, 6), world_size=world_size)
    assert after == names[8 : 8 + 4 * 2 * world_size]


def test_resume_keeps_the_number_of_rows_of_an_epoch_run(rows_file):
    config = make_config(rows_file, data={"packing": False}, steps=None, epochs=1.0)
    state = load(config, Rank(0, 2)).train.state_dict(3)  # 12 of 27 rows
    resumed = load(config, Rank(0, 1)).train
    resumed.load_state_dict(state)
    assert resumed.total_steps == 3 + 8
    assert len(documents_of(resumed, [10])) == 1


@pytest.mark.parametrize(
    "change", [{"seq_len": 300}, {"system_prompt": "x"}, {"max_train_rows": 20}, {"shuffle": False}]
)
def test_resume_with_other_data_is_refused(rows_file, change):
    state = load(make_config(rows_file)).train.state_dict(2)
    with pytest.raises(DataError, match="other data"):
        load(make_config(rows_file, data=change)).train.load_state_dict(state)


def test_packed_epoch_has_the_loss_of_transformers_on_each_conversation(rows_file, tmp_path):
    shape = tiny_shape(vocab_size=260)
    theirs = save_hf(shape, tmp_path / "model")
    ours = from_folder(tmp_path / "model", shape)
    config = make_config(rows_file, data={"eval_fraction": 0.0}, steps=None, epochs=1.0, micro_batch_size=8)
    train = load(config).train
    with torch.no_grad():
        losses = [sft_loss(ours, batch) for step in range(train.total_steps) for batch in train.step_batches(step)]
    expected = transformers_losses(theirs, load_tokenizer(config), rows_file)
    assert sum(int(loss.count) for loss in losses) == sum(count for _, count in expected)
    total = sum(float(loss.total) for loss in losses)
    assert total == pytest.approx(sum(loss for loss, _ in expected), rel=1e-5)


def transformers_losses(model, tokenizer, rows_file: str) -> list[tuple[float, int]]:
    """Sum of losses and number of targets of each conversation, by transformers alone."""
    losses = []
    for line in Path(rows_file).read_text().splitlines():
        row = json.loads(line)
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        out = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        mask = torch.as_tensor(out["assistant_masks"]).view(1, -1).bool()
        with torch.no_grad():
            mean = model(out["input_ids"], labels=out["input_ids"].where(mask, torch.tensor(-100))).loss
        losses.append((float(mean) * int(mask.sum()), int(mask.sum())))
    return losses


def test_resume_with_another_seed_is_refused(rows_file):
    state = load(make_config(rows_file)).train.state_dict(2)
    with pytest.raises(DataError, match=r"train\.seed"):
        load(make_config(rows_file, seed=1)).train.load_state_dict(state)


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "in a token file"])
def test_row_with_an_id_that_the_model_lacks_is_named_before_the_first_step(rows_file, tmp_path, kept):
    config = make_config(rows_file, data={"eval_fraction": 0.0})
    run_dir = tmp_path if kept else None
    with pytest.raises(DataError, match="token 0 has id 257, and the model has ids 0 to 256") as error:
        build_data(config, ALONE, load_tokenizer(config), run_dir=run_dir, model_vocab=257)
    assert error.value.where == f"{rows_file}:1"
    build_data(config, ALONE, load_tokenizer(config), run_dir=run_dir, model_vocab=259)  # 259, the last one, is unused


def test_stream_of_a_tokenizer_with_ids_that_the_model_lacks_is_refused(rows_file):
    config = make_config(rows_file, data={"streaming": True})
    with pytest.raises(DataError, match=r"the tokenizer has 260 ids and the model 259, and data\.streaming is true"):
        build_data(config, ALONE, load_tokenizer(config), model_vocab=259)


# --- what is left out ------------------------------------------------------------------------------------------------


def test_overlong_conversations_are_dropped_and_counted(rows_file):
    data = load(make_config(rows_file, data={"seq_len": 128, "overlong": "drop", "eval_fraction": 0.0}))
    dropped = data.report.train.dropped["longer than seq_len"]
    assert data.report.train.rows_kept == 30 - len(dropped) > 0
    assert f"{rows_file}:9" in dropped
    assert f"dropped, longer than seq_len: {dropped[0]}" in "\n".join(data.report.render())


def test_overlong_conversations_are_cut_and_those_without_target_dropped(rows_file):
    data = load(make_config(rows_file, data={"seq_len": 64, "eval_fraction": 0.0, "packing": False}))
    report = data.report.train
    [(reason, ids)] = report.dropped.items()
    assert reason == "no target token in the first 64 tokens"
    assert f"{rows_file}:9" in ids
    assert report.truncated
    assert report.rows_kept + len(ids) == report.rows_read == 30


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_no_row_left_is_an_error_with_reason_and_ids(rows_file, overlong):
    with pytest.raises(DataError, match="none of the 30 conversations") as error:
        load(make_config(rows_file, data={"seq_len": 16, "overlong": overlong, "eval_fraction": 0.0}))
    assert f"{rows_file}:1" in error.value.message
    assert "data.seq_len" in error.value.hint


def test_report_has_exact_counts(rows_file):
    data = load(make_config(rows_file, steps=None, epochs=1.0))
    batches = [batch for step in range(data.train.total_steps) for batch in data.train.step_batches(step)]
    report = data.report.train
    assert report.packed_rows == real_rows(batches).total()
    assert report.padding_share == pytest.approx(1 - report.tokens / (256 * report.packed_rows))
    assert (report.rows_read, report.rows_kept) == (27, 27)


def test_template_that_trains_no_end_token_is_noted(rows_file, tmp_path):
    path = tmp_path / "plain.jinja"
    path.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}")
    assert (
        "will not learn to stop" in load(make_config(rows_file, data={"chat_template": str(path)})).report.render()[-1]
    )
    assert load(make_config(rows_file)).report.notes == []


def test_processes_tokenize_to_the_same_rows_however_often_they_are_asked():
    config = Config(data=DataConfig(max_train_rows=300, eval_fraction=0.0))
    tokenizer, rows = load_tokenizer(config), list(read_rows(config))
    alone = RowEncoder(tokenizer, config.data)
    several = RowEncoder(tokenizer, replace(config.data, workers=2))
    expected = [(row.key, row.document.id, row.document.ids.tolist()) for row in alone.encode(rows)]
    for _ in range(2):
        assert [(row.key, row.document.id, row.document.ids.tolist()) for row in several.encode(rows)] == expected
    several.close()


class Reads(ListStore):
    """Notes which documents are read."""

    def __init__(self, docs: list[Encoded]) -> None:
        super().__init__(docs)
        self.seen: set[int] = set()

    def __getitem__(self, index: int) -> Encoded:
        self.seen.add(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("made_of", [TrainLoader, EvalSet])
def test_a_rank_reads_the_documents_of_its_own_rows_alone(packing, made_of):
    config = make_config("unused", data={"packing": packing, "seq_len": 16}, steps=1, global_batch_size=20)
    docs = [Encoded(str(n), np.full(9 + n % 7, n, np.int32), np.ones(9 + n % 7, bool)) for n in range(20)]
    stores = [Reads(docs) for _ in range(2)]
    for rank, store in enumerate(stores):
        documents = Documents(Selection(store, np.arange(20)), SplitReport("train"), Mixture.of_one(20))
        made = made_of(documents, config=config, ranks=Rank(rank, 2), pad_id=0)
        batches = made.step_batches(0) if made_of is TrainLoader else made.batches()
        assert {int(id) for batch in batches for id in batch.input_ids[batch.doc_ids >= 0]} == store.seen
    assert stores[0].seen | stores[1].seen == set(range(20))
    assert not stores[0].seen & stores[1].seen


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_held_out_rows_are_not_trained_on(rows_file):
    data = load(make_config(rows_file, data={"packing": False}, steps=None, epochs=1.0))
    trained = [batch for step in range(data.train.total_steps) for batch in data.train.step_batches(step)]
    assert real_rows(data.eval.batches()).total() == 3
    assert real_rows(data.eval.batches()).keys().isdisjoint(real_rows(trained))


def test_copies_of_a_row_are_held_out_together(rows_file):
    path = Path(rows_file)
    path.write_text(path.read_text() * 2)
    report = load(make_config(rows_file, data={"eval_fraction": 0.35})).report
    assert (report.eval.rows_kept, report.eval.duplicates) == (22, 11)
    assert (report.train.rows_kept, report.train.duplicates) == (38, 19)
    assert not any("word for word in the training data" in line for line in report.notes)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_divide_the_evaluation_rows(rows_file, world_size):
    config = make_config(rows_file, data={"eval": [rows_file], "max_eval_rows": 11})
    alone = load(config).eval.batches()
    parts = [load(config, Rank(rank, world_size)).eval.batches() for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    assert sum((real_rows(part) for part in parts), Counter()) == real_rows(alone)
    assert sum(num_targets(part) for part in parts) == num_targets(alone)


def test_eval_batches_limits_each_rank(rows_file):
    config = make_config(rows_file, data={"eval": [rows_file], "packing": False}, eval_batches=2)
    for rank in range(3):
        assert len(load(config, Rank(rank, 3)).eval.batches()) == 2


def test_eval_batches_limits_each_rank_with_a_token_budget(rows_file):
    data = {"eval": [rows_file], "packing": False}
    config = make_config(rows_file, data=data, eval_batches=2, micro_batch_tokens=512, global_batch_size=4)
    parts = [load(config, Rank(rank, 2)).eval.batches() for rank in range(2)]
    assert [len(part) for part in parts] == [2, 2]
    assert max(batch.input_ids.numel() for part in parts for batch in part) <= 512


def test_max_eval_rows_limits_the_held_out_conversations(rows_file):
    data = load(make_config(rows_file, data={"eval_fraction": 0.5, "max_eval_rows": 4}))
    assert (data.report.train.rows_read, data.report.eval.rows_read) == (26, 4)


def test_eval_fraction_zero_means_no_evaluation(rows_file):
    data = load(make_config(rows_file, data={"eval_fraction": 0.0}))
    assert (len(data.eval), data.report.eval, data.report.train.rows_read) == (0, None, 30)


def test_builtin_text_is_evaluated_on_its_held_out_modules():
    data = load(Config(data=DataConfig(max_train_rows=50, max_eval_rows=20)))
    assert (data.report.train.rows_read, data.report.eval.rows_read) == (50, 20)


@pytest.mark.parametrize("budget", [None, 512])
def test_ranks_documents_are_those_of_the_step(rows_file, budget):
    config = make_config(rows_file, data={"packing": False}, global_batch_size=7, micro_batch_tokens=budget)
    train = load(config, Rank(0, 3)).train
    by_rank = [train.rank_documents(2, rank) for rank in range(3)]
    assert all(by_rank)
    alone = load(replace(config, train=replace(config.train, micro_batch_tokens=None))).train
    assert sorted(name for names in by_rank for name in names) == sorted(documents_of(alone, [2]))
