"""Prints the lowest versions that pyproject.toml allows for the core, as constraints for pip."""

import pathlib
import re
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())
for requirement in project["project"]["dependencies"]:
    name, version = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
    print(f"{name}=={version}")
    if name == "jax":
        print(f"jaxlib=={version}")
