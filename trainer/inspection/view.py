"""An inspection on a screen or as JSON. Control characters in the data never reach the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from trainer.console import printable
from trainer.inspection.inspect_run import Inspection, Schedule
from trainer.inspection.samples import Label, Piece, Sample
from trainer.memory.plans import Choice, render_table, usable
from trainer.words import GIB, render_bytes

SHOWN_SAVINGS = 4
SHOWN_TOKENS = 1500
"""Tokens of one sample on a screen; JSON contains all."""

STYLES = {Label.TARGET: "bold green", Label.CONTEXT: "dim", Label.PADDING: "blue"}
BORDER_STYLE = "magenta"


def print_inspection(inspection: Inspection, stream: IO[str]) -> None:
    """Print everything in sections; with colours on a terminal, else with `[[target]]` marks."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    coloured = console.color_system is not None
    console.print(_legend(coloured))
    for number, sample in enumerate(inspection.samples, 1):
        console.print(Text(f"\n{_sample_title(number, sample)}", style="bold"))
        console.print(render_sample(sample, coloured=coloured))
    for title, lines in _sections(inspection):
        console.print(Text(f"\n{title}", style="bold"))
        for line in lines:
            console.print(Text(printable(line)))


def _sections(inspection: Inspection) -> Iterator[tuple[str, list[str]]]:
    memory = inspection.memory
    if inspection.notes:
        yield "notes", [f"note: {note}" for note in inspection.notes]
    yield "data", inspection.data.render()
    float8 = [] if inspection.float8 is None else [inspection.float8]
    yield "model and plan", [*inspection.parameters.render(), *inspection.plan.render(), *float8]
    yield f"memory of each rank, estimated: {render_bytes(memory.total)} at the peak", memory.render()
    if inspection.plans is not None:
        card = f"{inspection.plans.free / GIB:.1f} GiB"
        title = f"plans for memory on a card of {card}; parallel.memory=auto takes the first that fits (*)"
        yield title, render_table(inspection.plans)
    yield "what would lower it", [f"  {saving.render()}" for saving in inspection.savings[:SHOWN_SAVINGS]]
    yield "schedule", [*render_schedule(inspection.schedule), *inspection.rates]


def render_schedule(schedule: Schedule) -> list[str]:
    """Two lines: the length, and the learning rates."""
    epochs = "an unknown part of a stream" if schedule.epochs is None else f"{schedule.epochs:.2f} epochs"
    rates = f"{schedule.lr_first:.3g} first, {schedule.lr_peak:.3g} at its peak, {schedule.lr_last:.3g} last"
    return [
        f"{schedule.steps:,} steps of {schedule.rows_per_step:,} rows: {epochs}, about {schedule.tokens:,} tokens",
        f"learning rate {rates}; {schedule.warmup_steps:,} steps of warm-up",
    ]


# --- samples ----------------------------------------------------------------------------------------------------------


def _legend(coloured: bool) -> Text:
    words = {
        Label.TARGET: "target: predicted, counts in the loss",
        Label.CONTEXT: "context: seen, masked from the loss",
        Label.PADDING: "padding",
    }
    if not coloured:
        return Text("legend: [[target: predicted, counts in the loss]] context: seen, masked from the loss")
    return Text("legend: ").join([Text(""), Text("   ").join(Text(text, style=STYLES[k]) for k, text in words.items())])


def _sample_title(number: int, sample: Sample) -> str:
    counts = ", ".join(f"{sample.count(label):,} {label.value}" for label in Label)
    return f"sample {number}: {sample.documents} document(s); tokens: {counts}"


def render_sample(sample: Sample, *, coloured: bool) -> Text:
    """The row's text with its labels and the borders of its documents."""
    text, shown, document = Text(), 0, 0
    for piece in sample.pieces:
        if shown >= SHOWN_TOKENS and piece.label != Label.PADDING:
            rest = sum(p.tokens for p in sample.pieces if p.label != Label.PADDING) - shown
            text.append(f"\n… {rest:,} more tokens", style=BORDER_STYLE)
            break
        if piece.document != document and piece.label != Label.PADDING:
            text.append("\n──── next document ────\n", style=BORDER_STYLE)
            document = piece.document
        text.append_text(_render_piece(piece, coloured=coloured))
        shown += piece.tokens
    return text


def _render_piece(piece: Piece, *, coloured: bool) -> Text:
    if piece.label == Label.PADDING:
        return Text(f"\n({piece.tokens:,} padding)", style=STYLES[Label.PADDING])
    plain = printable(piece.text)
    if piece.label == Label.TARGET and not coloured:
        return Text(f"[[{plain}]]")
    return Text(plain, style=STYLES[piece.label])


# --- JSON -------------------------------------------------------------------------------------------------------------


def inspection_to_dict(inspection: Inspection) -> dict[str, Any]:
    """The inspection as plain values; sizes in bytes."""
    plan, memory = inspection.plan, inspection.memory
    return {
        "samples": [
            {
                **{label.value: sample.count(label) for label in Label},
                "documents": sample.documents,
                "pieces": [asdict(piece) | {"label": piece.label.value} for piece in sample.pieces],
            }
            for sample in inspection.samples
        ],
        "data": asdict(inspection.data),
        "parameters": asdict(inspection.parameters),
        "plan": asdict(plan) | {"ranks": plan.shards * plan.replicas, "parameters": plan.params},
        "float8": inspection.float8,
        "memory": asdict(memory) | {"total": memory.total},
        "memory_plans": None if inspection.plans is None else _plans_to_dict(inspection.plans),
        "savings": [asdict(saving) for saving in inspection.savings],
        "schedule": asdict(inspection.schedule) | {"rates": inspection.rates},
        "notes": inspection.notes,
    }


def _plans_to_dict(choice: Choice) -> dict[str, Any]:
    plans = [
        {"plan": one.plan.render(), **asdict(one.plan), "needs": one.needs, "fits": one.needs <= usable(choice.free)}
        for one in choice.priced
    ]
    return {"card": choice.free, "chosen": choice.index, "plans": plans}
