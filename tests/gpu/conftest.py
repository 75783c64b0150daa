"""These tests need CUDA; on a machine without a GPU they are not collected."""

import shutil

collect_ignore_glob = [] if shutil.which("nvidia-smi") else ["test_*.py"]
