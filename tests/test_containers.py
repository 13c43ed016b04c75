"""Stages in real containers: the same keys and bytes as on the host, and no way out."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import ENGINE, ROOT, podman_or_skip
from mill import STAGES, Mill, finished, payload_sums
from workshop import Workshop

from stages.wrapper.record import key_of, run_of


@pytest.fixture(scope="module", autouse=True)
def podman() -> str:
    return podman_or_skip()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path / "a house (v2)")
    (shop.root / "docker").mkdir()
    shop.write("docker/run", (ROOT / "docker" / "run").read_text()).chmod(0o755)
    shop.write("stages/toy.py", "def count(job):\n    pass\ndef meet(job, step):\n    pass\n")
    for kind in ("build", "grader"):
        shop.write(f"docker/{kind}.Dockerfile", "")
    return shop


def containers() -> str:
    """The names of ours that exist now."""
    listed = subprocess.run([ENGINE, "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True,
                            check=True)
    return listed.stdout


def test_a_container_gives_the_hosts_keys_and_bytes_and_a_switch_reruns_nothing(
        tmp_path_factory: pytest.TempPathFactory) -> None:
    host = finished(tmp_path_factory)
    mill = Mill.make(tmp_path_factory.mktemp("mill") / "my drafts (v2)")
    said = mill.run("pack", "--with-upstream", "--runner", ENGINE)
    assert payload_sums(mill) == payload_sums(host)
    for stage in STAGES[:-1]:
        assert key_of(mill.record(stage)) == key_of(host.record(stage)), stage
        if stage != "pack":
            assert mill.files(stage) == host.files(stage), stage
        run = run_of(mill.record(stage))
        assert (run["runner"], run["locked"]) == (ENGINE, True)
        assert run["image"]["system"].startswith(("Debian", "Ubuntu"))
        assert run["image"]["digest"].startswith("sha256:")
        assert [layer[:7] for layer in run["image"]["layers"]] == ["sha256:"]
        assert run["image"]["environment"] == "Python 3.12 and .venv of the host, mounted read-only"
        assert "image" not in run_of(host.record(stage))
    assert "runs, because" not in mill.run("pack", "--with-upstream")
    assert "runs, because" in said
    assert "runs, because" not in host.copy(tmp_path_factory.mktemp("copy") / "mill").run(
        "pack", "--with-upstream", "--runner", ENGINE)


def test_a_stage_sees_what_it_declares_and_its_surroundings_are_fixed(workshop: Workshop) -> None:
    look = '''    import pathlib
    seen = {path.name for path in job.root.iterdir()}
    seen |= {f"build/toy/{path.name}" for path in (job.root / "build" / "toy").iterdir()}
    write = {name: os.environ.get(name) for name in ("HOME", "USER", "TZ", "LC_ALL", "SOURCE_DATE_EPOCH",
             "OMP_NUM_THREADS", "PYTHONHASHSEED", "HF_HUB_OFFLINE", "HF_TOKEN")}
    write |= {"root": sorted(seen), "network": sorted(os.listdir("/sys/class/net")), "uid": os.getuid()}
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    write["capabilities"] = status["CapEff"].strip()
    import json
    (job.out / "seen.json").write_text(json.dumps(write))
'''
    workshop.replace("stages/distill.py", "    count(job)\n", look)
    workshop.replace("stages/distill.py", "from stages.grain", "import os\nfrom stages.grain")
    workshop.write("secret.txt.d/x", "x")
    workshop.write(".hidden", "x")
    workshop.run("all", RUNNER=ENGINE, HF_TOKEN="hf_CANARYcanaryCANARY000")
    seen = json.loads((workshop.root / "build/toy/distill/seen.json").read_text())
    made = {"build", "stages", "build/toy/data", "build/toy/.work", "build/toy/.distill.partial", "logs"}
    assert made <= set(seen["root"])
    assert not {"vendor", "output", ".hidden", "build/toy/pack"} & set(seen["root"])
    assert seen["network"] == ["lo"]
    assert int(seen["capabilities"], 16) == 0
    assert seen["uid"] == os.getuid()  # so that what is written is the caller's
    assert (seen["HOME"], seen["USER"], seen["TZ"], seen["LC_ALL"]) == ("/tmp", "draftmill", "UTC", "C.UTF-8")
    assert (seen["SOURCE_DATE_EPOCH"], seen["OMP_NUM_THREADS"]) == ("315532800", "1")
    assert (seen["PYTHONHASHSEED"], seen["HF_HUB_OFFLINE"], seen["HF_TOKEN"]) == ("0", "1", None)


@pytest.mark.parametrize(("line", "sentence"), [
    ("socket.create_connection(('192.0.2.7', 443), 5)", "tried to reach 192.0.2.7:443; only fetch may meet"),
    ("socket.getaddrinfo('example.org', 80)", "tried to reach example.org:80; only fetch may meet"),
    ("swallow(lambda: socket.create_connection(('192.0.2.7', 443), 5))", "tried to reach 192.0.2.7:443"),
    ("open('/etc/mill.conf', 'w')", "tried to write /etc/mill.conf, outside its folder build/toy/.data"),
    ("open(job.root / 'stages' / 'data.py', 'a')", "/stages/data.py, outside its folder"),
    ("open(job.inputs['fetch'] / 'more.txt', 'w')", "/vendor/more.txt, outside its folder"),
    ("os.mkdir('/opt/mine')", "tried to write /opt/mine, outside its folder"),
])
def test_a_way_out_is_refused_with_stage_and_address_or_path(
        workshop: Workshop, line: str, sentence: str) -> None:
    swallow = "import socket\ndef swallow(call):\n    try: call()\n    except OSError: pass\n"
    workshop.replace("stages/data.py", "import os\n", f"import os\n{swallow}")
    workshop.replace("stages/data.py", "    count(job)\n", f"    {line}\n")
    said = workshop.run("all", RUNNER=ENGINE, code=2)
    (refusal,) = [text for text in said.splitlines() if text.startswith("draftmill: data: ")]
    assert sentence in refusal
    assert "Traceback" not in said
    assert not (workshop.root / "logs/toy/data.json").exists()


def test_this_machine_itself_may_be_asked(workshop: Workshop) -> None:
    ask = ("    import socket\n    with socket.create_server(('127.0.0.1', 0)) as held:\n"
           "        socket.create_connection(('localhost', held.getsockname()[1]), 5).close()\n")
    workshop.replace("stages/data.py", "    count(job)\n", ask)
    workshop.run("data", "--with-upstream", RUNNER=ENGINE)


@pytest.mark.parametrize("declared", [True, False])
def test_declared_servers_are_reached_from_a_container_and_no_others(
        workshop: Workshop, declared: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, asked = one.getsockname()[1], (one if declared else other).getsockname()[1]
        workshop.write("profiles/toy.toml", 'extends = "smollm2"\n[teacher]\nengine = "openai"\n'
                                            f'[servers]\naddresses = ["http://127.0.0.1:{port}"]\n')
        ask = f"    import socket\n    socket.create_connection(('127.0.0.1', {asked}), 5).close()\n"
        workshop.replace("stages/data.py", "    count(job)\n", ask)
        workshop.replace("stages/data.py", "SECTIONS =", 'REACHES = "servers"\nSECTIONS =')
        said = workshop.run("data", "--with-upstream", RUNNER=ENGINE, code=0 if declared else 2)
    refusal = f"data: tried to reach 127.0.0.1:{asked}; this stage may reach http://127.0.0.1:{port}"
    assert (refusal in said) is not declared
    if declared:
        assert run_of(workshop.record("data"))["reached"] == [f"http://127.0.0.1:{port}"]


def test_a_fault_is_still_a_fault(workshop: Workshop) -> None:
    workshop.replace("stages/data.py", "    count(job)\n", "    open('/nowhere/x')\n")
    said = workshop.run("data", "--with-upstream", RUNNER=ENGINE, code=1)
    assert "draftmill: data: failed: FileNotFoundError" in said


def waiting(workshop: Workshop) -> Path:
    """Let data tell that it is there, and then wait for ever."""
    workshop.replace("stages/data.py", "    count(job)\n",
                     "    (job.work / 'here').touch()\n    import time\n    time.sleep(600)\n")
    return workshop.root / "build" / "toy" / ".work"


def start_and_wait(workshop: Workshop) -> "subprocess.Popen[str]":
    work = waiting(workshop)
    process = workshop.start("data", "--with-upstream", RUNNER=ENGINE)
    end = time.monotonic() + 60
    while not list(work.glob("data-*/here")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    assert f"draftmill-data-{process.pid}" in containers()
    return process


def wait_for_its_end(process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 30
    while f"draftmill-data-{process.pid}\n" in containers():
        assert time.monotonic() < end, "the container outlived its caller"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_reaches_the_stage(workshop: Workshop, number: int, code: int) -> None:
    process = start_and_wait(workshop)
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == code, said + errors
    assert "goes on from where it was" in errors
    wait_for_its_end(process)


def test_a_kill_of_the_wrapper_ends_its_container(workshop: Workshop) -> None:
    process = start_and_wait(workshop)
    process.kill()
    process.communicate(timeout=60)
    wait_for_its_end(process)


def test_an_image_that_went_is_a_sentence(workshop: Workshop) -> None:
    """The engine answers and names the image, but cannot start it."""
    workshop.write("docker/run", "#!/bin/sh\necho 'no such image' >&2\nexit 125\n").chmod(0o755)
    said = workshop.run("fetch", RUNNER=ENGINE, code=2)
    assert "no such image" in said
    assert "fetch: podman could not start its container" in said


def test_a_gpu_that_is_not_there_is_a_sentence(workshop: Workshop) -> None:
    """podman is asked in its own words, so it refuses; docker's --gpus it would take in silence."""
    workshop.write("profiles/toy.toml", 'extends = "smollm2"\ndevice = "cuda"\n')
    workshop.replace("stages/data.py", "TAKES", 'LIBRARIES = ("torch",)\nTAKES')
    said = workshop.run("all", RUNNER=ENGINE, code=2, CUDA_VISIBLE_DEVICES="")
    assert "fetch: done" in said  # which needs none
    refused = "data: podman could not start its container" in said and "nvidia.com/gpu=all" in said
    # Where the engine has devices to give, the worker counts them.
    assert refused or "data: the profile says device = 'cuda', which needs 1 GPU, and 0 can be" in said


def test_a_token_reaches_fetch_alone_and_no_command_line(workshop: Workshop) -> None:
    token = "hf_CANARYcanaryCANARY000"
    workshop.replace("stages/fetch.py", "    count(job)\n", """    count(job)
    import os, time
    job.event("token", length=len(os.environ.get("HF_TOKEN", "")), value=os.environ.get("HF_TOKEN"))
    (job.out / "here").touch()
    while not (job.out / "go").exists():
        time.sleep(0.05)
""")
    process = workshop.start("fetch", RUNNER=ENGINE, HF_TOKEN=token)
    end = time.monotonic() + 60
    while not (workshop.root / "vendor" / "here").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    assert any(b"draftmill-fetch-" in line for line in lines)
    assert not any(token.encode() in line for line in lines)
    (workshop.root / "vendor" / "go").touch()
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, said + errors
    log = (workshop.root / "logs" / "toy" / "fetch.log").read_text()
    assert '"length": 24' in log
    assert token not in said + errors + log + (workshop.root / "logs" / "toy" / "fetch.json").read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user here")
def test_what_another_user_owns_stays_that_users(tmp_path: Path) -> None:
    """docker/run as uid 1003 with umask 077 (rootful engines are given the caller's number)."""
    folder = tmp_path / "out"
    folder.mkdir()
    os.chown(folder, 1003, 1003)
    options = ("--user", "1003:1003", "--write", str(folder), "localhost/draftmill-base:latest")
    work = ("sh", "-c", f"umask 077; mkdir '{folder}/a' && echo x >'{folder}/a/b'")
    command = [str(ROOT / "docker" / "run"), ENGINE, *options, *work]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    assert (folder / "a" / "b").stat().st_uid == 1003
    remove = [sys.executable, "-c", "import os, sys, shutil; os.setuid(1003); shutil.rmtree(sys.argv[1])",
              str(folder / "a")]
    tmp_path.chmod(0o755)
    for parent in folder.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    subprocess.run(remove, check=True, cwd="/")
    assert not (folder / "a").exists()
