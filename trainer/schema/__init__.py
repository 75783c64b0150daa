"""Everything that can be configured, with its unit and its rule beside it, and the names of a run folder's files.

It imports neither torch nor yaml: the deployer reads it on a laptop that has neither. Each section has a module.
`trainer.config.load` loads files and overrides into these classes and checks the rules that span fields.
"""

from trainer.schema.config import (
    Config,
    RunConfig,
    kind_of_training,
    learning_rate_of,
    with_changes,
    with_key,
)
from trainer.schema.data import DataConfig, SourceConfig, as_sources
from trainer.schema.model import LoraConfig, ModelConfig
from trainer.schema.optim import GroupConfig, OptimConfig
from trainer.schema.parallel import ParallelConfig
from trainer.schema.run_folder import (
    ADAPTER_DIR,
    CACHE_ENV,
    CHECKPOINT_MARKER,
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    EXPORT_DIR,
    JOB_ID_ENV,
    MEMORY_PLAN_FILE,
    METRICS_FILE,
    NODE_ENV,
    OUTCOME_FILE,
    RESTARTED_ENV,
    RUN_DIR_ENV,
    SAMPLES_FILE,
    STARTED_ENV,
    STOP_FILE,
)
from trainer.schema.target import AUTO_GPUS, TargetConfig, gpu_count
from trainer.schema.train import TrainConfig

__all__ = [
    "ADAPTER_DIR",
    "AUTO_GPUS",
    "CACHE_ENV",
    "CHECKPOINTS_DIR",
    "CHECKPOINT_MARKER",
    "CONFIG_FILE",
    "Config",
    "DataConfig",
    "EXPORT_DIR",
    "GroupConfig",
    "JOB_ID_ENV",
    "LoraConfig",
    "MEMORY_PLAN_FILE",
    "METRICS_FILE",
    "ModelConfig",
    "NODE_ENV",
    "OUTCOME_FILE",
    "OptimConfig",
    "ParallelConfig",
    "RESTARTED_ENV",
    "RUN_DIR_ENV",
    "RunConfig",
    "SAMPLES_FILE",
    "STARTED_ENV",
    "STOP_FILE",
    "SourceConfig",
    "TargetConfig",
    "TrainConfig",
    "as_sources",
    "gpu_count",
    "kind_of_training",
    "learning_rate_of",
    "with_changes",
    "with_key",
]
