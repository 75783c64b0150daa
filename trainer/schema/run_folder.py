"""The names of a run folder's files, and of the variables that say where it is and who started it."""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"  # one JSON object a line; training steps and evaluations
SAMPLES_FILE = "samples.jsonl"  # one JSON object a line: what the model said to run.sample_prompts
CONFIG_FILE = "config.yaml"  # the resolved config
OUTCOME_FILE = "outcome.json"  # how the run ended: the last file of rank 0, or by the rank that failed first
CHECKPOINTS_DIR = "checkpoints"  # step_NNNNNN/ each with a COMPLETE marker
CHECKPOINT_MARKER = "COMPLETE"
EXPORT_DIR = "export"  # Hugging Face format
ADAPTER_DIR = "adapter"  # inside it, PEFT's format
MEMORY_PLAN_FILE = "memory_plan.json"  # what parallel.memory=auto has chosen, and which plans ran out of memory
STOP_FILE = "control/stop.json"  # its existence asks the ranks to save and stop at the next step border

RUN_DIR_ENV = "TORCHFERRY_RUN_DIR"  # the run folder, set by whoever launches
JOB_ID_ENV = "TORCHFERRY_JOB_ID"  # marks every process of a job
CACHE_ENV = "TORCHFERRY_CACHE"  # where compiled code is kept, set by the deployer: below the host's root
STARTED_ENV = "TORCHFERRY_STARTED_S"  # when the launcher began, in seconds since the machine started
RESTARTED_ENV = "TORCHFERRY_RESTARTED"  # set when the host started the job again after a failure, by itself
NODE_ENV = "TORCHFERRY_NODE"  # the number of this node in a job on several hosts
