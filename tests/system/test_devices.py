"""A device that is asked for and not there is one line, before anything else is done."""

import os
import subprocess
import sys

import jax
import pytest

from jrl.errors import UserError
from jrl.system import devices
from jrl.system.devices import find_devices


def test_the_devices_are_those_of_jax():
    assert find_devices() == jax.devices()


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize backend"), AssertionError()])
def test_what_is_asked_for_and_absent(error, monkeypatch):
    def none():
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setattr(devices, "missing", lambda needed: needed)
    with pytest.raises(UserError) as caught:
        find_devices()
    message = str(caught.value)
    assert message.startswith("JAX_PLATFORMS = 'cuda': JAX finds no such device here")
    assert "[cuda13]" in message
    assert message.endswith("; or set JAX_PLATFORMS=cpu")
    assert "\n" not in message


def test_what_is_installed_is_not_advised(monkeypatch):
    def none():
        raise RuntimeError("no TPU")

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setattr(devices, "packages", lambda extra: ["jax[tpu]"])
    for absent, message in (([], "this machine has no TPU that it finds"), (["libtpu"], "[tpu]")):
        monkeypatch.setattr(devices, "missing", lambda needed, absent=absent: absent)
        with pytest.raises(UserError) as caught:
            find_devices()
        assert message in str(caught.value)
        assert ("pip install" in str(caught.value)) == bool(absent)


def test_a_gpu_that_jax_was_not_installed_for_is_said(monkeypatch):
    lines = []
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(devices.Path, "exists", lambda path: True)
    find_devices(lines.append)
    assert len(lines) == 1
    assert "NVIDIA GPU" in lines[0]


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (a@b)  Tue\nGCC"
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 26\nGCC version:  gcc 12.3.0\n"


@pytest.mark.parametrize(
    ("text", "driver", "cuda", "line"),
    [
        (OPEN, "580.82.07", 13, None),
        (OLD, "525.60.13", 12, None),
        (OLD, "535.104.05", 13, r"driver 535.104.05 is older than CUDA 13.*\(580.*\[cuda12\]"),
        (OLD, "470.57.02", 12, r"470.57.02 is older than CUDA 12.*\(525 or newer\): update it, or"),
    ],
)
def test_a_driver_that_is_too_old_is_said(text, driver, cuda, line, monkeypatch, tmp_path):
    (tmp_path / "version").write_text(text.format(driver))
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "version")
    plugin = f"jax_cuda{cuda}_plugin"
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name == plugin or None)
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(devices.Path, "exists", lambda path: False)
    if line is None:
        assert find_devices() == jax.devices()  # the CPU's, for another reason
        return
    with pytest.raises(UserError, match=line) as caught:
        find_devices()
    assert str(caught.value).endswith("or set JAX_PLATFORMS=cpu")
    assert "\n" not in str(caught.value)


def test_libtpu_is_left_alone_where_there_is_no_tpu(monkeypatch, tmp_path):
    """It is there to compile for TPUs; started without one it prints errors on the terminal."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "vendor").write_text("0x8086\n")
    monkeypatch.setattr(devices, "PCI_VENDORS", f"{tmp_path}/*/vendor")
    monkeypatch.setattr(devices, "OTHERS", (f"{tmp_path}/accel*",))
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
    assert jax.config.jax_platforms
    assert not devices.libtpu_is_idle()  # who asked for a platform gets it
    monkeypatch.setattr(jax.config.__class__, "jax_platforms", None)
    assert devices.libtpu_is_idle()
    (tmp_path / "accel0").touch()
    assert not devices.libtpu_is_idle()
    (tmp_path / "accel0").unlink()
    (tmp_path / "0" / "vendor").write_text("0x1ae0\n")
    assert not devices.libtpu_is_idle()
    (tmp_path / "0" / "vendor").write_text("0x8086\n")
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert not devices.libtpu_is_idle()


@pytest.mark.slow
@pytest.mark.extra("plan")
def test_a_command_on_a_cpu_says_nothing_of_tpus(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    del env["JAX_PLATFORMS"]
    result = subprocess.run(
        [sys.executable, "-m", "jrl", "doctor"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert "(cpu" in result.stdout
    assert result.stderr == ""


def test_a_gpus_memory_is_taken_but_for_a_rest(monkeypatch):
    """JAX's own share is three quarters, with which a plan that fits would not run."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    find_devices()
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == str(devices.GPU_MEMORY_SHARE)


def test_the_command_says_it_without_a_traceback(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "jrl", "train", "data.task=sorting", "run.dir=run"],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    if result.returncode == 0:
        pytest.skip("this machine has one")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("jrl: error: JAX_PLATFORMS = 'cuda'")
    assert not (tmp_path / "run").exists()


def test_methods_are_listed_without_a_device():
    result = subprocess.run(
        [sys.executable, "-m", "jrl", "methods", "--family", "nothing"],
        env=os.environ | {"JAX_PLATFORMS": "tpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("jrl: error: --family = 'nothing'; ")


def test_no_module_asks_for_a_device_while_it_is_imported():
    """A message about devices comes before anything else, and `jrl --help` needs none."""
    script = (
        "import importlib, pkgutil, jrl\n"
        "for module in pkgutil.walk_packages(jrl.__path__, 'jrl.'):\n"
        "    try: importlib.import_module(module.name)\n"
        "    except ImportError: pass  # of an extra\n"
        "import jax\n"
        "assert not jax._src.xla_bridge._backends\n"
    )
    env = os.environ | {"JAX_PLATFORMS": "nowhere", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
