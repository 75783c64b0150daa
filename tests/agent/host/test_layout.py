"""What a typed id may stand for."""

import pytest

from deployer.agent.host.layout import matching_ids, name_ids

IDS = ["sft-2-a1b2", "sft-1-c3d4", "sft", "a1b2-9-ffff", "other-5-a1b2"]


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("sft", ["sft"]),
        ("sft-", ["sft-2-a1b2", "sft-1-c3d4"]),
        ("c3d4", ["sft-1-c3d4"]),
        ("a1b2", ["a1b2-9-ffff"]),  # a beginning comes before an end
        ("-a1b2", ["sft-2-a1b2", "other-5-a1b2"]),
        ("x", []),
    ],
)
def test_typed_id_means_itself_or_all_that_begin_or_all_that_end_with_it(typed, means):
    assert matching_ids(typed, IDS) == means


def test_many_ids_are_named_up_to_six_and_the_rest_counted():
    assert name_ids(list("abcdefgh")) == "8 jobs: a, b, c, d, e, f and 2 more"
    assert name_ids(["a", "b"]) == "2 jobs: a, b"
