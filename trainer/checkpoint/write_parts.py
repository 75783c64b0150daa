"""Writes a checkpoint into several storages: each has a part, and all parts are complete or none is.

torch writes each tensor once over all ranks. Here it is written once on each storage that has it: so a rank that comes
back to its place finds everything beside it, and a storage that has a whole replica is a whole checkpoint.
All parts are first written and synced, without a marker. Only when every storage has done that, each part gets its
marker and its name. So a marker anywhere says that the whole checkpoint is on disk, and a start can finish the rest.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint.agree import has_unfinished, settle
from trainer.checkpoint.errors import CheckpointError, on_all, write_error
from trainer.checkpoint.folders import (
    METADATA_FILE,
    SPREAD_FORMAT,
    ChecksummingWriter,
    Manifest,
    entry_of,
    make_empty,
    prepare,
    seal,
)
from trainer.checkpoint.spread import Part, Spread
from trainer.checkpoint.states import State, is_random, random_name
from trainer.dist import Group, from_rank0, gather
from trainer.files import sync_folder, write_synced
from trainer.nodes import Storages
from trainer.schema import CHECKPOINT_MARKER

if TYPE_CHECKING:
    from trainer.checkpoint.write import Order, StageHook


def write_parts(order: Order, storages: Storages, state: State, group: Group, on_stage: StageHook) -> None:
    """Write each storage's part, and give all of them their names. Raises CheckpointError on every rank."""
    aside, failure = order.aside, partial(write_error, order.final)
    files, writer = Manifest(), PartsWriter(aside, storages)

    def shards() -> None:
        dcp.save(state, storage_writer=writer, planner=PartsPlanner(storages), process_group=group)
        files.update(writer.manifest)

    unfinished = gather(order.is_keeper and has_unfinished(order.folder), group)
    if any(unfinished):
        settle(order.folder, storages, order.rank, group)  # else a part that `make_empty` removes may be missed
    on_all(lambda: make_empty(aside) if order.is_keeper else None, group, failure)
    on_stage("begun")
    on_all(shards, group, failure)
    needs = from_rank0(writer.needs, group)
    metadata = _metadata_here(order, storages, writer, group)
    on_stage("shards")
    others = gather(_random_state(order), group)
    on_all(lambda: files.update(_write_small(order, others, metadata)), group, failure)
    on_stage("random")
    info = _info(order, storages, files, needs, group)
    kept: list[bytes] = []
    on_all(lambda: kept.append(prepare(aside, info)) if order.is_keeper else None, group, failure)
    on_stage("state")
    _seal_all(order, kept, group, on_stage)


def _metadata_here(order: Order, storages: Storages, writer: PartsWriter, group: Group) -> bytes:
    """The `.metadata` of this rank's storage. It can have many MB, so one after the other is sent."""
    mine, kept = storages.of_rank[order.rank], b""
    for storage in range(len(storages.names)):
        sent = from_rank0(writer.metadata[storage] if writer.metadata else b"", group)
        kept = sent if storage == mine else kept
    return kept


def _random_state(order: Order) -> tuple[str, bytes]:
    """The file of this rank's random state, which every storage gets: name and content."""
    content = io.BytesIO()
    torch.save(order.random, content)
    return random_name(order.rank), content.getvalue()


def _write_small(order: Order, random: Sequence[tuple[str, bytes]], metadata: bytes) -> Manifest:
    """On each storage, write the random states of all ranks and its `.metadata`."""
    if not order.is_keeper:
        return {}
    small = {**dict(random), METADATA_FILE: metadata}
    for name, data in small.items():
        write_synced(order.aside / name, data)
    return {name: entry_of(data) for name, data in small.items()}


def _info(
    order: Order, storages: Storages, files: Manifest, needs: Sequence[Sequence[str]], group: Group
) -> dict[str, Any]:
    """The content of `state.json` of this rank's storage."""
    told, save = gather(files, group), from_rank0(uuid.uuid4().hex, group)
    entries = [{name: (entry[0], entry[1]) for name, entry in own.items()} for own in told]
    parts = []
    for storage, node in enumerate(storages.names):
        ranks = storages.ranks(storage)
        held = {name: entry for rank in ranks for name, entry in entries[rank].items() if not is_random(name)}
        parts.append(Part(node, tuple(ranks), held))
    common = {name: entry for name, entry in entries[0].items() if is_random(name)}
    mine = storages.of_rank[order.rank]
    spread = Spread(save, mine, tuple(parts), common, tuple(needs[mine]))
    return {
        "format": SPREAD_FORMAT,
        "step": order.step,
        "world_size": order.world_size,
        **order.info,
        "files": spread.own,
        "spread": asdict(spread),
    }


def _seal_all(order: Order, kept: list[bytes], group: Group, on_stage: StageHook) -> None:
    """Give every part its marker and its name. If one cannot have them, those that have are taken back."""
    sealed: list[Path] = []

    def seal_mine() -> None:
        if order.is_keeper:
            seal(order.aside, order.final, kept[0], on_stage)
            sealed.append(order.final)

    try:
        on_all(seal_mine, group, partial(write_error, order.final))
    except CheckpointError:
        for path in sealed:
            with suppress(OSError):
                (path / CHECKPOINT_MARKER).unlink()
                path.rename(order.aside)
                sync_folder(path.parent)
        raise


# --- torch's part -----------------------------------------------------------------------------------------------------


class PartsWriter(ChecksummingWriter):
    """Writes shards. Afterwards rank 0 has a `.metadata` for each storage, and the shards that this refers to."""

    def __init__(self, path: Path, storages: Storages) -> None:
        super().__init__(path)
        self.metadata: list[bytes] = []
        self.needs: list[list[str]] = []
        self._storages = storages

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Of a tensor that several storages have, the last result counts: each storage's own come last for it."""
        for storage in range(len(self._storages.names)):
            order = sorted(range(len(results)), key=lambda rank: self._storages.of_rank[rank] == storage)
            ordered = [results[rank] for rank in order]
            super().finish(metadata, ordered)
            self.metadata.append((Path(self.path) / METADATA_FILE).read_bytes())
            files = {one.index: one.storage_data.relative_path for part in ordered for one in part}
            self.needs.append(sorted(set(files.values())))
        self.manifest.pop(METADATA_FILE, None)  # each storage's keeper writes its own


class PartsPlanner(DefaultSavePlanner):
    """Has each tensor, or chunk of one, written once on every storage that has it."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _, metadata = super().create_global_plan(all_plans)
        items = share_out([plan.items for plan in all_plans], self._storages)
        return [replace(plan, items=mine) for plan, mine in zip(all_plans, items, strict=True)], metadata


def share_out(items: Sequence[Sequence[WriteItem]], storages: Storages) -> list[list[WriteItem]]:
    """The items that each rank writes: each item once on every storage, by the rank with the least to write so far."""
    taken: list[list[WriteItem]] = [[] for _ in items]
    for storage in range(len(storages.names)):
        sizes = dict.fromkeys(storages.ranks(storage), 0)
        holders: dict[MetadataIndex, dict[int, WriteItem]] = {}
        for rank in sizes:
            for item in items[rank]:
                holders.setdefault(item.index, {})[rank] = item
        for who in holders.values():
            rank = min(who, key=lambda one: (sizes[one], one))
            sizes[rank] += who[rank].tensor_storage_size() or 1
            taken[rank].append(who[rank])
    return taken
