"""Long documents are cut so that every token but a document's first is a target exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import pack
from tests.trainer.data.token_files import document, write
from trainer.data.dataset.store import PieceStore, cut_documents


def test_pieces_overlap_by_one_token(tmp_path):
    file = write(tmp_path / "a.tokens", [document(range(10, 18), name="a"), document([1, 2], name="b")])
    store = PieceStore([file], seq_len=4)
    assert [(piece.id, piece.ids.tolist()) for piece in (store[index] for index in range(len(store)))] == [
        ("a[0:4]", [10, 11, 12, 13]),
        ("a[3:7]", [13, 14, 15, 16]),
        ("a[6:8]", [16, 17]),
        ("b", [1, 2]),
    ]


@pytest.mark.parametrize(
    ("length", "pieces"), [(0, []), (1, []), (2, [2]), (4, [4]), (5, [4, 2]), (7, [4, 4]), (8, [4, 4, 2])]
)
def test_lengths_of_pieces_of_four(length, pieces):
    assert cut_documents(np.array([length]), seq_len=4).length.tolist() == pieces


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(2, 9))
def test_every_token_but_the_first_of_a_document_is_a_target_once(tmp_path_factory, lengths, seq_len):
    folder = tmp_path_factory.mktemp("t")
    docs = [document(range(100 * n, 100 * n + length)) for n, length in enumerate(lengths)]
    files = [write(folder / f"{n}.tokens", docs[n::2]) for n in (0, 1)]
    store = PieceStore(files, seq_len=seq_len)
    rows = pack([store[index] for index in range(len(store))], seq_len)
    labels = sorted(int(label) for row in rows for label in row.labels[row.labels >= 0])
    assert labels == sorted(int(token) for doc in docs for token in doc.ids[1:])


def test_pieces_keep_the_targets_that_a_file_names(tmp_path):
    targets = [1, 0, 0, 1, 1, 0, 1]
    file = write(tmp_path / "a.tokens", [document(range(7), targets=targets)], has_targets=True)
    store = PieceStore([file], seq_len=4)
    assert [store[index].is_target.astype(int).tolist() for index in (0, 1)] == [[1, 0, 0, 1], [1, 1, 0, 1]]


def test_fingerprint_changes_with_files_and_seq_len(tmp_path):
    one, other = (write(tmp_path / f"{n}.tokens", [document([n, 1, 2])]) for n in (0, 1))
    stores = [PieceStore([one], seq_len=4), PieceStore([other], seq_len=4), PieceStore([one], seq_len=5)]
    assert len({store.fingerprint for store in stores}) == 3
