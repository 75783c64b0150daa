"""A script in the place of nvidia-smi."""

from __future__ import annotations

from pathlib import Path

LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aabb2222-0000)
  MIG 1g.10gb     Device  0: (UUID: MIG-1234-5678)
"""


def fake_smi(folder: Path, *, gpus: str = "", apps: str = "", use: str = "", then: str = "exit 0") -> dict[str, str]:
    """An environment whose nvidia-smi prints these texts. The use of the GPUs it reads anew from the file `use`."""
    for name, text in {"gpus": gpus, "apps": apps, "use": use, "listing": LISTING}.items():
        (folder / name).write_text(text)
    script = folder / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
case "$1" in
--query-gpu=*utilization*) cat {folder}/use;;
--query-gpu=*) cat {folder}/gpus;;
--query-compute-apps=*) cat {folder}/apps;;
-L) cat {folder}/listing;;
esac
{then}
"""
    )
    script.chmod(0o755)
    # `all`: who runs the tests may have hidden GPUs from this process, as ranks.py does
    return {"PATH": f"{folder}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "all"}
