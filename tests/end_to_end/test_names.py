"""Names as bytes on the whole way there and back, in locales that read them in another way or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ferry import Ferry

# bytes that are no UTF-8 are surrogates here, as Python has them
FILES = ("ä.txt", "漢.txt", "lat\udce9.txt", "d\udce9r/x\udcff \n.txt")
IGNORED = "bl\udce4h/y.txt"
WORD, VALUE = "w\udce9ä", "v\udce9ä"
SAYS = f"""
import os
words = open('/proc/self/cmdline', 'rb').read().split(bytes(1))
print(words[-2] == {os.fsencode(WORD)}, os.environb[b'VALUE'] == {os.fsencode(VALUE)}, os.readlink(b'l\\xf6nk'))
export = os.path.join(os.environb[b'TORCHFERRY_RUN_DIR'], b'export', b'\\xe9')
os.makedirs(export)
open(os.path.join(export, '漢'.encode() + b'\\xff'), 'w').close()
print(os.path.abspath(b'.'))
"""


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


@pytest.fixture(params=["ascii", "de_DE.ISO-8859-1", "ja_JP.EUC-JP"])
def locale(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """An environment in which Python's names are not UTF-8, on the client and, as it is the same machine, the host."""
    if request.param == "ascii":
        return ASCII
    if shutil.which("localedef") is None:
        pytest.skip("no localedef here")
    language, charset = request.param.split(".")
    made = subprocess.run(["localedef", "-i", language, "-f", charset, tmp_path / request.param], capture_output=True)
    if made.returncode > 1:
        pytest.skip(f"localedef cannot make it: {made.stderr.decode(errors='replace')}")
    return {"LC_ALL": request.param, "LOCPATH": str(tmp_path)}


def below(folder: Path) -> set[str]:
    found = (Path(at, name) for at, _, files in os.walk(folder, followlinks=True) for name in files)
    return {str(path.relative_to(folder)) for path in found}


def test_names_words_and_values_arrive_and_come_home_byte_for_byte(ferry: Ferry, locale: dict[str, str]) -> None:
    ferry.env |= locale
    for name in (*FILES, IGNORED):
        (ferry.project / name).parent.mkdir(exist_ok=True)
        (ferry.project / name).touch()
    (ferry.project / ".deployignore").write_bytes(b"bl\xe4h/\n")
    (ferry.project / "l\udcf6nk").symlink_to("lat\udce9.txt")
    ferry.write("says.py", SAYS)
    ferry.root = ferry.root.with_name("r\udce9ä")
    run = ("run", *ferry.where(), "--name", "n", "--include", "d\udce9r", "--env", f"VALUE={VALUE}")
    done = ferry.run(*run, "--", "python3", "says.py", WORD)
    assert done.returncode == 0, done.stderr.decode()
    job = ferry.job()
    assert done.stdout.splitlines() == [b"True True b'lat\\xe9.txt'", repr(os.fsencode(job / "code")).encode()]
    assert b"left out bl\\xe4h/ (1 file)" in done.stderr
    assert below(job / "code") == {".deployignore", "l\udcf6nk", "says.py", *FILES}
    assert "export/\udce9/漢\udcff" in below(ferry.project / "results" / job.name)
    shown = ferry.run(*run, "--dry-run", "--json", "--", "python3", "says.py", WORD)
    assert json.loads(shown.stdout)["target"]["root"] == str(ferry.root)
    refused = ferry.run("run", *ferry.where(), "--include", "n\udcffx", "--", "true")
    assert (refused.returncode, b"n\\xffx does not exist" in refused.stderr) == (2, True)


def test_trainer_reads_the_file_that_its_config_names(ferry: Ferry) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    ferry.write("漢.jsonl", json.dumps(row) + "\n")
    ferry.write("ä.yaml", f"{{target: {{device: cpu}}, data: {{train: 漢.jsonl}}, model: {json.dumps(MODEL)}}}")
    train = [sys.executable, str(ferry.source / "train.py"), "ä.yaml", "--inspect"]
    done = subprocess.run(train, cwd=ferry.project, env={**ferry.environment(), **ASCII}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
