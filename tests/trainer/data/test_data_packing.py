"""Rows hold whole documents, and every label belongs to the document of its position."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import pack
from trainer.data.batches.packing import plan_rows
from trainer.data.tokenize.chat import Encoded


def document(first: int, length: int, *, name: str = "d") -> Encoded:
    """Ids first, first + 1, …; all are targets."""
    return Encoded(name, np.arange(first, first + length, dtype=np.int32), np.ones(length, dtype=bool))


def test_two_documents_in_a_row_are_laid_out_by_hand():
    first = Encoded("a", np.array([5, 6, 7, 8], dtype=np.int32), np.array([True, False, True, True]))
    [row] = pack([first, document(151643, 2)], 8, pad_id=9)
    assert row.input_ids.tolist() == [5, 6, 7, 8, 151643, 151644, 9, 9]
    assert row.labels.tolist() == [-100, 7, 8, -100, 151644, -100, -100, -100]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert row.doc_ids.tolist() == [0, 0, 0, 0, 1, 1, -1, -1]


def test_token_of_a_document_is_a_target_though_it_is_also_the_padding():
    [row] = pack([Encoded("a", np.array([5, 9, 9], dtype=np.int32), np.ones(3, dtype=bool))], 5, pad_id=9)
    assert row.input_ids.tolist() == [5, 9, 9, 9, 9]
    assert row.labels.tolist() == [9, 9, -100, -100, -100]


def test_unpacked_rows_hold_one_document_each():
    rows = pack([document(0, 3), document(10, 2)], 4, packing=False)
    assert [row.doc_ids.tolist() for row in rows] == [[0, 0, 0, -1], [0, 0, -1, -1]]


def test_best_fit_takes_the_fullest_row_that_has_room():
    # 6 and 5 open rows with 4 and 5 left; 4 goes where 4 is left, and 3 where 5 is left
    assert plan_rows([3, 6, 5, 4], range(4), seq_len=10, packing=True) == [[1, 3], [2, 0]]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 16), max_size=60))
def test_packing_loses_no_token_and_no_target(lengths):
    documents = [document(1000 * i, length) for i, length in enumerate(lengths)]
    rows = pack(documents, 16)
    tokens = sorted(int(t) for row in rows for t in row.input_ids[row.doc_ids >= 0])
    assert tokens == [int(t) for doc in documents for t in doc.ids]
    assert sum(int((row.labels >= 0).sum()) for row in rows) == sum(length - 1 for length in lengths)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_no_row_is_too_long_and_no_two_would_fit_into_one(lengths):
    rows = plan_rows(lengths, range(len(lengths)), seq_len=16, packing=True)
    fill = sorted(sum(lengths[i] for i in row) for row in rows)
    assert fill[-1] <= 16
    assert sum(fill[:2]) > 16 or len(rows) == 1
