"""Which rank is on which node, which nodes share a run folder, and which mesh follows: tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.configs import config_of
from trainer.config.load import check_config
from trainer.config.parallel import Mesh, mesh_of, sharding
from trainer.config.target import World
from trainer.errors import ConfigError
from trainer.nodes import Claim, Nodes, are_several, nodes_of, read_claim, storages_of
from trainer.schema import ParallelConfig


def claims(*places: tuple[int, int | None, str], store: int | None = None) -> list[Claim]:
    return [Claim(local, group, host, holds_store=rank == store) for rank, (local, group, host) in enumerate(places)]


def nodes(*counts: int) -> Nodes:
    of_rank = [node for node, count in enumerate(counts) for _ in range(count)]
    return Nodes(tuple(of_rank), tuple(f"node {node} (h{node})" for node in range(len(counts))))


@pytest.mark.parametrize(
    ("env", "several"),
    [
        ({}, False),
        ({"WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}, True),
    ],
)
def test_several_nodes_are_those_whose_ranks_are_fewer_than_all(env, several):
    assert are_several(env) is several


def test_nodes_follow_torchruns_numbers_and_are_named_by_their_hosts():
    found = nodes_of(claims((0, 1, "b"), (1, 1, "b"), (0, 0, "a"), store=2))
    assert found == Nodes((0, 0, 1), ("node 0 (b)", "node 1 (a)"), store=1)
    assert (found.counts, found.ranks(0), found.first(1), found.name_of(2)) == ([2, 1], [0, 1], 2, "node 1 (a)")


def test_without_torchruns_numbers_a_local_rank_0_begins_a_node():
    assert nodes_of(claims((0, None, "a"), (1, None, "a"), (0, None, "b"))).of_rank == (0, 0, 1)


def test_node_has_the_number_of_its_job():
    claim = read_claim({"LOCAL_RANK": "1", "GROUP_RANK": "0", "TORCHFERRY_NODE": "3"})
    assert (claim.local_rank, claim.group, claim.label) == (1, 0, "3")
    assert nodes_of([Claim(0, 0, "a", "3"), Claim(0, 1, "b", "1")]).names == ("node 3 (a)", "node 1 (b)")


@pytest.mark.parametrize(
    ("seen", "of_rank"),
    [
        ([{0, 1, 2}, {0, 1, 2}, {0, 1, 2}], None),
        ([{0}, {1}, {2}], (0, 0, 1, 2)),
        ([{0, 2}, {1}, {2}], (0, 0, 1, 0)),  # node 2 has not seen the new file of node 0 yet
        ([{0, 1}, {1, 2}, {2}], None),
        ([{0}, {1, 2}, {1, 2}], (0, 0, 1, 1)),
    ],
)
def test_one_sighting_proves_that_two_nodes_share_the_folder(seen, of_rank):
    found = storages_of(nodes(2, 1, 1), seen)
    assert (found and found.of_rank) == of_rank


def test_storage_is_named_by_its_nodes_and_kept_by_its_first_rank():
    found = storages_of(nodes(2, 1, 1), [{0, 2}, {1}, {2, 0}])
    assert found is not None
    assert found.names == ("node 0 (h0) and node 2 (h2)", "node 1 (h1)")
    assert (found.keepers, found.keeper(3), found.ranks(0)) == ([0, 2], 0, [0, 1, 3])


DEFAULT = "; parallel.sharding_strategy=FULL_SHARD shards over all"


@pytest.mark.parametrize(
    ("counts", "parallel", "expected"),
    [
        ((4,), {}, None),
        ((2, 2), {}, Mesh(2, f"mesh: 2 replicas x 2 shards: each node holds a whole replica{DEFAULT} 4 ranks")),
        ((1, 1, 1), {}, Mesh(3, f"mesh: 3 replicas x 1 shard: each rank holds the whole model{DEFAULT} 3 ranks")),
        ((2, 2), {"sharding_strategy": "FULL_SHARD"}, Mesh(None, "mesh: 1 replica x 4 shards, over 2 nodes")),
        ((2, 2), {"dp_replicate": 1}, Mesh(1, "mesh: 1 replica x 4 shards, over 2 nodes")),
        ((4, 4), {"dp_replicate": 4}, Mesh(4, "mesh: 4 replicas x 2 shards (parallel.dp_replicate=4) on 2 nodes")),
        ((2, 2), {"reshard_after_forward": 2}, Mesh(None, "mesh: 1 replica x 4 shards, over 2 nodes")),
        (
            (2, 2),
            {"reshard_after_forward": False},
            Mesh(2, f"mesh: 2 replicas x 2 shards: each node holds a whole replica{DEFAULT} 4 ranks"),
        ),
        (
            (3, 1),
            {},
            Mesh(
                None,
                "mesh: 1 replica x 4 shards: the nodes have 3, 1 ranks, so a replica on each node is not possible",
            ),
        ),
        ((2, 2), {"sharding_strategy": "NO_SHARD"}, None),
    ],
)
def test_mesh_of_several_nodes_is_a_replica_on_each_unless_the_config_says_otherwise(counts, parallel, expected):
    assert mesh_of(config_of(parallel=parallel), counts) == expected


@pytest.mark.parametrize(
    ("counts", "in_order", "parallel", "message"),
    [
        ((3, 1), True, {"sharding_strategy": "HYBRID_SHARD"}, "as many ranks on each node: the nodes have 3, 1 ranks"),
        ((3, 1), True, {"dp_replicate": 2}, "parallel.dp_replicate is 2, and replicas need as many ranks"),
        (
            (2, 2),
            True,
            {"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": 2},
            "parallel.reshard_after_forward is 2, not a part of the 2",
        ),
        ((2, 2), False, {"dp_replicate": 2}, "the ranks of a node are not adjacent"),
        ((2, 2), True, {"dp_replicate": 3}, "parallel.dp_replicate is 3, which does not divide 4 ranks"),
    ],
)
def test_replicas_that_these_ranks_cannot_form_are_refused_with_what_works(counts, in_order, parallel, message):
    with pytest.raises(ConfigError, match=message) as caught:
        mesh_of(config_of(parallel=parallel), counts, in_order=in_order)
    assert any(word in caught.value.hint for word in ("FULL_SHARD", "use one of [1, 2, 4]", "use true or false"))


def test_config_is_checked_for_the_ranks_of_all_nodes():
    config = config_of(target={"gpu_ranks": [0, 1]}, train={"global_batch_size": 8})
    config = replace(config, parallel=replace(config.parallel, sharding_strategy="HYBRID_SHARD"))
    with pytest.raises(ConfigError, match="does not say how many replicas 2"):
        check_config(config)
    check_config(config, world=World(4, 2))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dp_replicate": 2}, "HYBRID_SHARD"),
        ({"dp_replicate": 2, "reshard_after_forward": False}, "_HYBRID_SHARD_ZERO2"),
        ({"dp_replicate": 1}, "FULL_SHARD"),
    ],
)
def test_replicas_alone_make_a_hybrid(options, word):
    how = sharding(ParallelConfig(**options))
    assert (how.word, how.hybrid) == (word, word.strip("_").startswith("HYBRID"))
