"""The code of 836d9e4, and both clients with a host for the tests of one file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.gpus.test_gpus import fake_smi
from tests.compat.versions import Versions, ending_jobs, extract


@pytest.fixture(scope="session")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, old_code: Path) -> Iterator[Versions]:
    """On a host with four GPUs."""
    folder = tmp_path_factory.mktemp("both")
    four = "".join(f"{n}, GPU-{n}, Fake H100, 81559, 4\n" for n in range(4))
    with ending_jobs(Versions.make(folder, old_code, **fake_smi(folder, gpus=four))) as versions:
        yield versions
