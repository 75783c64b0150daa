"""All oracles, in the order of docs/correctness.md."""

from __future__ import annotations

from tests.oracles import chat, curve, decoder, flops, loop, lora, losses, optim, resume
from tests.oracles.measure import Oracle

ORACLES: list[Oracle] = [
    *decoder.ORACLES,
    *losses.ORACLES,
    *chat.ORACLES,
    *loop.ORACLES,
    *curve.ORACLES,
    *lora.ORACLES,
    *optim.ORACLES,
    *resume.ORACLES,
    *flops.ORACLES,
]
