"""The trainer in the simulated world: what its ranks, its savers and its checkpoints promise."""
