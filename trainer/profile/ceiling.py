"""How far a traced step is from what its card can do."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.profile.where import COMMUNICATION, GAPS, StepTime


@dataclass(frozen=True)
class Ceiling:
    """Rates in TFLOP/s; MFU and the parts of the step in percent."""

    products_tflops: float
    sustained_tflops: float
    mfu: float
    gaps: float
    exposed: float
    mfu_without: float
    """If there were neither gaps nor exposed communication."""

    def line(self) -> str:
        return (
            f"products at {self.products_tflops:.0f} of {self.sustained_tflops:.0f} TFLOP/s that the card sustains, "
            f"MFU {self.mfu:.1f} %; without the {self.gaps:.1f} % gaps and {self.exposed:.1f} % exposed communication "
            f"it would be {self.mfu_without:.1f} %"
        )


def ceiling_of(
    time: StepTime, *, products: float, attention: float, peak_flops: float, sustained_flops: float
) -> Ceiling | None:
    """`products` and `attention`: operations of the step on this card that training needs, so neither recomputed nor
    padded ones. None for a step without products."""
    products_s = time.of("products").ms / 1e3
    if products_s == 0:
        return None
    gaps, exposed = time.percent(GAPS), time.percent(COMMUNICATION)
    mfu = 100 * (products + attention) / (time.span_ms / 1e3 * peak_flops)
    return Ceiling(
        products_tflops=products / products_s / 1e12,
        sustained_tflops=sustained_flops / 1e12,
        mfu=mfu,
        gaps=gaps,
        exposed=exposed,
        mfu_without=mfu / (1 - (gaps + exposed) / 100),
    )
