"""A host that is simulated: the shipped agent runs in it unchanged, under many schedules and faults."""
