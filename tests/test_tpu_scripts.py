"""The scripts for pods: what they would run, and that launching, watching and stopping works."""

from __future__ import annotations

import math
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib

import pytest

from jrl.config import load_config
from jrl.plan.topology import SHAPES

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tpu_scripts"
RUNNABLE = sorted(p for p in SCRIPTS.glob("*.sh") if p.name != "common.sh")


def script(name, *args, ok=True, **env):
    # Configurations are not read, but where a test is about that.
    jrl = {"JRL": "true"} if name in ("launch.sh", "gke.sh", "slurm.sh") else {}
    done = subprocess.run(
        [SCRIPTS / name, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ZONE": "", "PROJECT": "", **jrl, **env},
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout if ok else done.stderr


def dry(name, *args):
    """The commands of a dry run, each as the arguments that the shell would see."""
    return [shlex.split(line) for line in script(name, "--dry-run", *args).splitlines()]


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.name)
def test_every_script_parses_and_explains_itself(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert f"{path.name} " in script(path.name, "--help")
    assert path.name in (SCRIPTS / "README.md").read_text()
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize(
    ("topology", "accelerator", "runtime"),
    [
        ("v5e:4x4", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p:8x8x16", "v5p-2048", "v2-alpha-tpuv5"),
        ("v6e:8x8", "v6e-64", "v2-alpha-tpuv6e"),
    ],
)
def test_create_names_the_accelerator_as_the_cloud_does(topology, accelerator, runtime):
    (command,) = dry("create.sh", "--zone", "z", "--name", "a", "--topology", topology)
    assert command[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "create", "a"]
    assert f"--accelerator-type={accelerator}" in command
    assert f"--version={runtime}" in command


def test_several_slices_are_one_queued_resource():
    args = ("--zone", "z", "--name", "a", "--slices", "2")
    (command,) = dry("create.sh", *args, "--spot")
    assert command[3:6] == ["queued-resources", "create", "a"]
    assert {"--node-count=2", "--node-prefix=a", "--spot"} <= set(command)
    assert dry("delete.sh", *args)[0][3:6] == ["queued-resources", "delete", "a"]


def test_launch_runs_the_same_line_on_every_host_of_every_slice():
    args = ("--zone", "z", "--name", "a", "--slices", "2")
    commands = dry("launch.sh", *args, "--", "c.toml", "data.system=a b")
    assert [c[5] for c in commands] == ["a-0", "a-1"]
    assert all("--worker=all" in c for c in commands)
    (line,) = {c[-1].removeprefix("--command=") for c in commands}
    resume = "$HOME/jrl/tpu_scripts/resume.sh"
    assert f"JRL_DISTRIBUTED=auto nohup {resume} $HOME/jrl/.venv/bin/jrl train c.toml" in line
    assert shlex.quote("data.system=a b") in line or r"data.system=a\ b" in line


def test_gke_and_slurm_say_what_they_would_run():
    (command,) = dry(
        "gke.sh",
        *("--zone", "z", "--cluster", "c", "--image", "i", "--slices", "2"),
        "--",
        "x.toml",
    )
    assert command[:3] == ["xpk", "workload", "create"]
    assert {"--tpu-type=v5litepod-16", "--num-slices=2", "--docker-image=i"} <= set(command)
    assert command[-1] == "--command=JRL_DISTRIBUTED=auto jrl train x.toml"
    (command,) = dry("slurm.sh", "--nodes", "4", "--", "x.toml", "a=1")
    assert command[0] == "sbatch"
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8"} <= set(command)
    line = "JRL_DISTRIBUTED=auto JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7 srun jrl train x.toml a=1"
    assert command[-1].startswith(f"--wrap={line}; code=$?;")
    (command,) = dry("slurm.sh", "--gpus", "h100:2", "--", "x.toml", "a=1")
    assert " JAX_LOCAL_DEVICE_IDS=0,1 srun" in command[-1]
    assert "scontrol requeue $SLURM_JOB_ID; exit $code" in command[-1]


GKE = ("--zone", "us-east5-a", "--cluster", "c")


def test_a_slice_that_nobody_named_is_shown():
    line = [SCRIPTS / "gke.sh", *GKE, "--image", "i", "--dry-run", "--", "nowhere.toml"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stderr == "nowhere.toml names no slice: v5e:4x4; --topology names another\n"
    line[-1:] = ["configs/pod_8b_v6e.toml", "run.dir=d"]
    assert not subprocess.run(line, capture_output=True, text=True, check=True).stderr


def test_the_flat_slices_are_those_of_plans():
    flat = re.search("flat='(.*?)'", (SCRIPTS / "common.sh").read_text())[1].split("|")
    assert tuple(flat) == SHAPES["v5e"] == SHAPES["v6e"]


NO_SLICES = ["h100x8", "v9z:4x4", "v5e:4xa", "v5e:5x5", "v6e:0x4", "v5e:08x8", "v5p:4x4"]


@pytest.mark.parametrize("topology", NO_SLICES)
def test_a_topology_of_no_tpu_ends_before_anything_is_built_or_submitted(topology, tmp_path):
    """The commands that would do it are in front of the PATH, and leave a file when called."""
    for name in ("docker", "xpk", "gcloud"):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\ntouch {tmp_path}/called\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "JRL": "true"}
    for line in (
        ["gke.sh", *GKE, "--project", "p", "--build", "--topology", topology, "--", "c.toml"],
        ["create.sh", "--zone", "z", "--topology", topology],
    ):
        command = [SCRIPTS / line[0], *line[1:]]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{line[0]}: topology {topology}; write v4:SHAPE")
    assert not (tmp_path / "called").exists()


def test_a_count_of_slices_that_is_no_number_is_named():
    error_output = script("launch.sh", "--zone", "z", "--slices", "two", "--", "c.toml", ok=False)
    assert error_output == "launch.sh: --slices two; write a whole number from 1\n"


@pytest.mark.parametrize(
    ("table", "overrides", "complete"),
    [
        ("", [], False),
        ("", ["run.dir="], False),
        ("[plan]\ndir = 'a'\n[run]\nresume = 'auto'\n[data]\ndir = 'b'\n", [], False),
        ("", ["run.dir=d"], True),
        ("[run]\nresume = 'auto'\ndir = 'd'\n", [], True),
        ("run.dir = 'd'\n", [], True),
        ("run = { resume = 'auto', dir = 'd' }\n", [], True),
        (" [run]\n dir = 'd'\n", [], True),
    ],
)
def test_a_run_that_could_not_resume_is_refused(tmp_path, table, overrides, complete):
    file = tmp_path / "c.toml"
    file.write_text(table)
    for name, options in (
        ("slurm.sh", ()),
        ("launch.sh", ("--zone", "z")),
        ("gke.sh", (*GKE, "--image", "i")),
    ):
        output = script(name, *options, "--dry-run", "--", str(file), *overrides, ok=complete)
        assert complete or f"{name}: run.dir is missing" in output
    assert "run.dir is missing" in script("slurm.sh", "--dry-run", "--", "method=grpo", ok=False)


def test_gke_builds_the_image_that_it_runs_or_says_how():
    build, push, create = dry("gke.sh", *GKE, "--project", "p", "--build", "--", "x.toml")
    (image,) = [a.removeprefix("--docker-image=") for a in create if "--docker-image" in a]
    assert re.fullmatch(r"us-east5-docker\.pkg\.dev/p/jrl/jrl:([0-9a-f]{12}|latest)", image)
    assert build[:2] == ["docker", "build"]
    assert build[2:] == ["-f", str(ROOT / "tpu_scripts/Dockerfile"), "-t", image, str(ROOT)]
    assert push == ["docker", "push", image]
    (only,) = dry("gke.sh", *GKE, "--project", "p", "--", "x.toml")
    assert only == create
    error_output = script("gke.sh", *GKE, "--dry-run", "--", "x.toml", ok=False)
    assert "write --project PROJECT --build to make" in error_output


def test_the_dockerfile_copies_what_is_there_and_installs_extras_that_exist():
    text = (ROOT / "tpu_scripts/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    sources = [part for line in lines if line.startswith("COPY ") for part in line.split()[1:-1]]
    assert sources == ["pyproject.toml", "README.md", "LICENSE", "jrl", "configs"]
    assert all((ROOT / source).exists() for source in sources)
    included = [
        x[1:]
        for x in (ROOT / "tpu_scripts/Dockerfile.dockerignore").read_text().split()
        if x.startswith("!")
    ]
    assert included == sources  # nothing else of the checkout reaches the builder
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"ARG EXTRAS=(\S+)", text)
    for extra in [*extras.split(","), *re.findall(r"EXTRAS=(cuda\d+)", text)]:
        assert extra in project["optional-dependencies"]
    (python,) = re.findall(r"ARG PYTHON=(\S+)", text)
    assert float(python.split(".")[1]) >= float(project["requires-python"].split(".")[1])


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="no package of hadolint here"
)
def test_the_dockerfile_has_no_fault_that_hadolint_knows():
    hadolint = pathlib.Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, ROOT / "tpu_scripts/Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


PODS = sorted((ROOT / "configs").glob("pod_*.toml"))


@pytest.mark.parametrize("path", PODS, ids=lambda p: p.stem)
def test_the_commands_of_every_pod_file_are_what_a_dry_run_names(path):
    """The slice that the file says, and the line of its first comment, on TPU VMs and on GKE."""
    text = path.read_text()
    topology = tomllib.loads(text)["plan"]["topology"]
    sizes = [int(size) for size in topology.partition(":")[2].split("x")]
    (line,) = re.findall(r"^#   jrl train (.*)$", text, re.MULTILINE)
    words = shlex.split(line)
    assert words[0] == f"configs/{path.name}"
    config = load_config(ROOT / words[0], words[1:])
    assert config.model.config is None
    assert None not in (config.model.path, config.data.train, config.run.dir)
    assert f"#   jrl plan {words[0]} --quick\n" in text

    here = ("--zone", "us-east5-a", "--name", "a", "--topology", topology)
    (create,) = dry("create.sh", *here)
    (kind,) = [a.removeprefix("--accelerator-type=") for a in create if "--accelerator-type" in a]
    chips = int(kind.rpartition("-")[2]) // (2 if kind.startswith("v5p") else 1)
    assert chips == math.prod(sizes)
    (launch,) = dry("launch.sh", *here, "--", *words)
    (gke,) = dry("gke.sh", *here, "--cluster", "c", "--image", "i", "--", *words)
    assert f"--tpu-type={kind}" in gke
    assert gke == dry("gke.sh", *here[:4], "--cluster", "c", "--image", "i", "--", *words)[0]
    for command in (launch, gke):
        (shell,) = [a.removeprefix("--command=") for a in command if a.startswith("--command=")]
        assert f"jrl train {' '.join(words)}" in shell


def test_the_benchmark_plans_here_and_measures_on_all_slices_at_once():
    args = ("--zone", "z", "--name", "a", "--topology", "v5e:4x4", "--slices", "2")
    commands = dry("benchmark.sh", *args, "--", "c.toml", "mesh.data=2", "--steps", "5")
    assert commands[0] == [
        *("jrl", "plan", "c.toml", "mesh.data=2", "--topology", "2*v5e:4x4", "--json")
    ]
    copies, measured = commands[1:3], commands[3:]
    assert [c[5:7] for c in copies] == [["a-plan.json", f"a-{i}:jrl/plan.json"] for i in (0, 1)]
    assert sorted(c[5] for c in measured) == ["a-0", "a-1"]
    (line,) = {c[-1].removeprefix("--command=") for c in measured}
    start = "cd $HOME/jrl && JRL_DISTRIBUTED=auto .venv/bin/python -m benchmarks.tpu c.toml"
    assert line.startswith(f"{start} mesh.data=2 --steps 5 --topology ")
    assert shlex.split(line)[-6:] == [
        *("--topology", "2*v5e:4x4", "--plan", "plan.json", "--json", "benchmark.json")
    ]
    lines = dry("benchmark.sh", *args[:4], "--plan", "p.json", "--", "c.toml")
    assert [c[0] for c in lines] == ["gcloud", "gcloud"]
    assert "p.json" in lines[0]


def test_the_benchmark_finds_a_configuration_of_the_checkout_from_anywhere(tmp_path):
    """The line of the scripts' README is called in their directory."""
    (line,) = re.findall(r"^    \./(benchmark\.sh .*)$", (SCRIPTS / "README.md").read_text(), re.M)
    name, *words = shlex.split(line)
    for place in (SCRIPTS, tmp_path, ROOT):
        command = [SCRIPTS / name, "--dry-run", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=place)
        planned = shlex.split(done.stdout.splitlines()[0])
        assert planned[:2] == ["jrl", "plan"]
        assert (place / planned[2]).samefile(ROOT / words[-1])
        assert f"benchmarks.tpu {words[-1]} " in done.stdout.replace("\\", "")


# Each notes what it was called with; curl writes a program that installs uv, as its own does.
STUBS = {
    "make": "#!/bin/bash\necho make $* >> $HOME/calls\n",
    "uv": "#!/bin/bash\necho uv $* >> $HOME/calls\n",
    "curl": (
        "#!/bin/bash\necho curl $* >> $HOME/calls\n"
        "echo 'mkdir -p $UV_UNMANAGED_INSTALL && cp $HOME/bin/uv $UV_UNMANAGED_INSTALL/uv'\n"
    ),
}


@pytest.mark.parametrize(
    ("new", "calls"),
    [
        ("python3", ["make install ACCEL=tpu PYTHON=python3"]),
        ("python3.12", ["make install ACCEL=tpu PYTHON=python3.12"]),
        (
            None,  # as on Ubuntu 22.04
            [
                "curl -LsSf https://astral.sh/uv/install.sh",
                "uv venv --seed --python 3.12 .venv",
                "make install ACCEL=tpu",
            ],
        ),
    ],
)
def test_hosts_with_an_old_python_get_a_newer_one(tmp_path, new, calls):
    """What setup.sh runs on a host, in a home directory with programs that only take notes."""
    checkout = tmp_path / "host" / "tpu_scripts"
    checkout.mkdir(parents=True)
    for name in ("common.sh", "install.sh"):
        (checkout / name).write_bytes((SCRIPTS / name).read_bytes())
        (checkout / name).chmod(0o755)
    archive = ["tar", "-czf", tmp_path / "source.tar.gz", "-C", tmp_path / "host", "tpu_scripts"]
    subprocess.run(archive, check=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    pythons = ("python3", "python3.11", "python3.12", "python3.13")
    old = dict.fromkeys(pythons, "#!/bin/bash\nexit 1\n")
    right = {} if new is None else {new: "#!/bin/bash\nexit 0\n"}
    for name, text in {**STUBS, **old, **right}.items():
        if name != "uv" or new is None:
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
    line = dry("setup.sh", "--zone", "z")[-1][-1].removeprefix("--command=")
    env = {"HOME": str(tmp_path), "PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", line], check=True, cwd=tmp_path, env=env)
    assert (tmp_path / "calls").read_text().splitlines() == calls


def test_the_benchmark_ends_with_the_code_of_a_process_that_failed(tmp_path):
    """Two processes here, as two hosts: both are given the plan, and one of them fails."""
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\necho "$JAX_PROCESS_ID: $*"\nexit "$JAX_PROCESS_ID"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [
            *(SCRIPTS / "benchmark.sh", "--local", "2", "--topology", "v5e:2x2"),
            *("--plan", "p.json", "--", "c.toml", "data.system=a b"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": str(python)},
    )
    assert done.returncode == 1
    lines = sorted(done.stdout.splitlines())
    expected = "-m benchmarks.tpu c.toml data.system=a b --topology v5e:2x2 --plan p.json"
    assert lines == [f"{i}: {expected}" for i in (0, 1)]


def test_what_is_missing_is_named():
    assert "--zone is missing" in script("create.sh", ok=False)
    assert "nothing to measure" in script("benchmark.sh", "--zone", "z", ok=False)
    assert "nothing to run" in script("launch.sh", "--zone", "z", ok=False)
    assert "unknown option --nome" in script("status.sh", "--nome", "x", ok=False)
    assert "topology v9:1x1" in script("create.sh", "--zone", "z", "--topology", "v9:1x1", ok=False)


def test_an_option_without_a_value_or_with_a_wrong_one_is_named():
    words = ("--", "c.toml", "run.dir=d")
    for name, options, message in (
        ("create.sh", ["--zone"], "--zone has no value; --help shows it"),
        ("gke.sh", ["--zone", "z", "--cluster", ""], "--cluster has no value; --help shows it"),
        ("slurm.sh", ["--gpus"], "--gpus has no value; --help shows it"),
        ("slurm.sh", ["--gpus", "many", *words], "--gpus many; write a whole number from 1"),
        ("slurm.sh", ["--nodes", "0", *words], "--nodes 0; write a whole number from 1"),
        ("stop.sh", ["--local", "x"], "--local x; write a whole number from 1"),
    ):
        assert script(name, "--dry-run", *options, ok=False) == f"{name}: {message}\n"


def test_a_directory_that_shells_of_hosts_would_split_is_refused(tmp_path):
    for name, directory in (("setup.sh", "my jrl"), ("stop.sh", "/mnt/jrl"), ("logs.sh", "$x")):
        error = script(name, "--dry-run", "--zone", "z", "--dir", directory, ok=False)
        assert error.startswith(f"{name}: --dir {directory}; write a directory below the home")
    # Of processes on this machine it may be any.
    script("status.sh", "--local", "1", "--dir", str(tmp_path / "my runs"))
    assert (tmp_path / "my runs" / "host-0").is_dir()


def test_a_command_that_is_not_installed_is_named(tmp_path):
    for name in ("bash", "dirname", "basename", "sed", "git"):
        (tmp_path / name).symlink_to(shutil.which(name))
    line = ["--zone", "z", "--topology", "v5e:4x4"]
    error = script("create.sh", *line, ok=False, PATH=str(tmp_path))
    assert error.startswith("create.sh: gcloud is not on PATH; install it")


def test_a_mistake_in_the_configuration_is_found_before_anything_starts(tmp_path):
    jrl = tmp_path / "jrl"
    jrl.write_text('#!/usr/bin/env bash\necho "jrl: error: $*" >&2\nexit 1\n')
    jrl.chmod(0o755)
    words = ("--", "configs/pod_8b_v6e.toml", "train.stepps=3")
    for name in ("launch.sh", "slurm.sh"):
        output = script(name, "--dry-run", "--zone", "z", *words, ok=False, JRL=str(jrl))
        assert re.fullmatch(r"jrl: error: show-config \S+pod_8b_v6e.toml train.stepps=3\n", output)
    output = script("gke.sh", *GKE, "--image", "i", *words, ok=False, JRL=str(jrl))
    assert output.startswith("jrl: error: show-config")
    script("launch.sh", "--dry-run", "--zone", "z", "--", "/of/the/hosts.toml", JRL=str(jrl))


def test_local_processes_are_launched_watched_and_stopped(tmp_path):
    worker = tmp_path / "jrl"
    worker.write_text(
        "#!/usr/bin/env bash\n"
        "trap 'echo saved; exit 0' TERM\n"
        'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS: $*"\n'
        "while true; do sleep 0.05; done\n"
    )
    worker.chmod(0o755)
    hosts = ("--local", "2", "--dir", str(tmp_path / "run"))
    script("launch.sh", *hosts, "--", "c.toml", "data.system=a b", JRL=str(worker), PORT="7777")
    pids = []
    try:
        for host in range(2):
            folder = tmp_path / "run" / f"host-{host}"
            pids.append(int((folder / "train.pid").read_text()))
            expected = f"{host} of 2 at 127.0.0.1:7777: train c.toml data.system=a b\n"
            wait_for(lambda f=folder, s=expected: (f / "train.log").read_text() == s)
        assert script("status.sh", *hosts).split("\n")[:2] == ["running", "running"]
        assert "0 of 2 at" in script("logs.sh", *hosts)
        again = [SCRIPTS / "launch.sh", *hosts, "--", "c.toml"]
        done = subprocess.run(again, capture_output=True, text=True, env={**os.environ, "JRL": "x"})
        assert done.returncode == 2
        assert f"the run is still alive, process {pids[0]}; wait until" in done.stderr
        assert (tmp_path / "run/host-0/train.pid").read_text() == f"{pids[0]}\n"
        script("stop.sh", *hosts)
        wait_for(lambda: "not running\nnot running" in script("status.sh", *hosts))
        assert script("logs.sh", *hosts).count("saved") == 2
    finally:
        for pid in pids:
            subprocess.run(["kill", "-KILL", str(pid)], capture_output=True)


@pytest.mark.parametrize(
    ("codes", "runs"), [("0", 1), ("2", 1), ("3", 1), ("4", 1), ("130 134 0", 3), ("130 3", 2)]
)
def test_what_was_interrupted_is_run_again(tmp_path, codes, runs):
    """A command that ends with one code after another, and how often it is run."""
    (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
    command = tmp_path / "jrl"
    command.write_text(
        f"#!/usr/bin/env bash\ncd {tmp_path}\nread -r code < codes\nsed -i 1d codes\n"
        "echo run >> runs\nexit $code\n"
    )
    command.chmod(0o755)
    done = subprocess.run(
        [SCRIPTS / "resume.sh", command], env={**os.environ, "PAUSE": "0"}, timeout=60
    )
    assert done.returncode == int(codes.split()[-1])
    assert (tmp_path / "runs").read_text().count("run") == runs


def test_a_command_that_never_succeeds_is_not_run_for_ever(tmp_path):
    env = {**os.environ, "PAUSE": "0", "TRIES": "3"}
    command = ["bash", "-c", f"echo run >> {tmp_path}/runs; exit 139"]
    done = subprocess.run([SCRIPTS / "resume.sh", *command], env=env, timeout=60)
    assert done.returncode == 139
    assert (tmp_path / "runs").read_text() == "run\n" * 3


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
