"""Imports every module of the installed package; run from an empty directory."""

import importlib
import pathlib
import pkgutil

import jrl

home = pathlib.Path(jrl.__file__).parent
assert "site-packages" in home.parts, f"this is not the wheel: {home}"
assert (home / "py.typed").exists()
names = [module.name for module in pkgutil.walk_packages(jrl.__path__, "jrl.")]
for name in names:
    importlib.import_module(name)
print(f"jrl {jrl.__version__}: {len(names)} modules import from {home}")
