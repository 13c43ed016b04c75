"""A small repository with toy stages, run by the real wrapper in real processes."""

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("__init__", "clean", "environment", "errors", "files", "job", "plan", "run", "verify")
PACKAGES = ("profile", "upstream", "wrapper")
COUNT = '''
def count(job):
    with (job.root / "runs.txt").open("a") as stream:
        stream.write(job.stage + "\\n")
'''
STAGES = {
    "fetch": '''"""Bring a word."""
from stages.files import write_atomic
from stages.toy import count
SECTIONS = ("fetch",)
TAKES = ()
PLACE = "vendor"
IN_PLACE = True
def run(job):
    count(job)
    source = job.config.fetch.sources[0]
    write_atomic(job.out / source / "word.txt", "word")
    return {"subjects": [f"{source}/word.txt"], "files": 1}
''',
    "data": '''"""Turn the word over."""
import os
from stages.toy import count
SECTIONS = ("target", "data")
TAKES = ("fetch/{target.source}/*",)
FILES = ("examples/*.jsonl",)
def run(job):
    count(job)
    word = (job.inputs["fetch"] / job.config.target.source / "word.txt").read_text()
    (job.out / "rows").mkdir()
    (job.out / "rows" / "a.txt").write_text(word[::-1])
    return {"characters": len(word)}
''',
    "distill": '''"""Work in five steps."""
from stages.grain import GRAIN
from stages.toy import count, meet
SECTIONS = ("distill",)
TAKES = ("data",)
def run(job):
    count(job)
    done = job.work / "done.txt"
    text = done.read_text() if done.exists() else ""
    start = len(text)
    for step in range(start, 5):
        text += (job.inputs["data"] / "rows" / "a.txt").read_text()[step % 4]
        (job.out / "half.txt").write_text(text)
        done.write_text(text)
        meet(job, step)
    (job.out / "half.txt").unlink()
    (job.out / "drafter.txt").write_text(text * GRAIN + str(job.config.distill.learning_rate))
    return {"resumed_at": start}
''',
    "pack": '''"""Wrap it up."""
from stages.toy import count
SECTIONS = ("limits",)
TAKES = ("distill/*.txt",)
PLACE = "output"
def run(job):
    count(job)
    (job.out / "model.txt").write_text((job.inputs["distill"] / "drafter.txt").read_text())
    return {}
''',
}
MEET = '''
import os

def meet(job, step):
    """Where the file `gate` says so, tell the test that this step is done, and wait to be killed."""
    gate = job.root / "gate"
    if gate.exists() and int(gate.read_text()) == step:
        with (job.root / "arrived").open("w") as stream:
            stream.write(str(os.getpid()))
        with (job.root / "never").open() as stream:
            stream.read()
'''


class Workshop:
    """One toy repository under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "stages").mkdir(parents=True)
        for name in SHARED:
            shutil.copy(ROOT / "stages" / f"{name}.py", root / "stages")
        for name in PACKAGES:
            shutil.copytree(ROOT / "stages" / name, root / "stages" / name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in STAGES.items():
            self.write(f"stages/{name}.py", text)
        self.write("stages/toy.py", COUNT + MEET)
        self.write("stages/grain.py", "GRAIN = 2\n")
        self.write("examples/dev.jsonl", "{}\n")
        self.write("lock/build.txt", "pydantic==0.0.1 \\\n    --hash=sha256:00\n")
        shutil.copy(ROOT / "lock" / "sources.toml", root / "lock")
        shutil.copytree(ROOT / "profiles", root / "profiles")
        self.write("profiles/toy.toml", 'extends = "smollm2"\n')
        shutil.copy(ROOT / "Makefile", root)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def start(self, *arguments: str, module: str = "run", **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", f"stages.{module}", *arguments], cwd=self.root, text=True,
            env={**os.environ, "PROFILE": "toy", "RUNNER": "host", "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *arguments: str, code: int = 0, module: str = "run", **environment: str) -> str:
        """Run a module of the repository to its end; return what it said on both channels."""
        process = self.start(*arguments, module=module, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"exit {process.returncode}\n{out}{err}"
        return out + err

    def ran(self) -> list[str]:
        """The stage functions called since the last time of asking."""
        path = self.root / "runs.txt"
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return names

    def record(self, stage: str) -> dict:
        return json.loads((self.root / "logs" / "toy" / f"{stage}.json").read_text())

    def outputs(self) -> dict[str, bytes]:
        """Everything under the places, by name."""
        folders = [self.root / name for name in ("vendor", "output", "build/toy")]
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}

    def close_gate(self, step: int) -> None:
        """Let distill stop after this step, until it is killed."""
        self.write("gate", str(step))
        for name in ("arrived", "never"):
            (self.root / name).unlink(missing_ok=True)
            os.mkfifo(self.root / name)

    def wait_for_arrival(self) -> int:
        """Wait until distill stands at the gate; return its process id."""
        handle = os.open(self.root / "arrived", os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert select.select([handle], [], [], 60)[0], "the stage never came to its gate"
            return int(os.read(handle, 100))
        finally:
            os.close(handle)

    def open_gate(self) -> None:
        (self.root / "gate").unlink()
