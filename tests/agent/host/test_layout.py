"""What a typed id may stand for, and what a lease is called."""

import pytest

from deployer.agent.host.layout import matching_ids, name_ids
from deployer.agent.host.marks import leased_by

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


@pytest.mark.parametrize(
    ("path", "job_id"),
    [
        ("/tmp/.torchferry-leases/job-a-1-0123456789abcdef.lock", "a-1"),
        ("/tmp/.torchferry-leases-job-a-1-0123456789abcdef.lock", "a-1"),  # beside a folder of another user's
        ("/tmp/leases/job-my-job-1-0123456789abcdef.lock", "my-job-1"),
        ("/tmp/my-leases-job-my-job-1-0123456789abcdef.lock", "my-job-1"),
        ("/tmp/.torchferry-leases/new-0123456789abcdef", None),
        ("/tmp/job-a/0123456789abcdef.lock", None),
    ],
)
def test_lease_names_its_job_in_the_folder_and_beside_it(path: str, job_id: str | None) -> None:
    assert leased_by(path) == job_id
