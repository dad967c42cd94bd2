"""Write the API reference of the public classes as HTML, from their docstrings: api_reference.py FOLDER."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pdoc
from pdoc import docstrings

import fastgen

MODULES = ("fastgen", r"!fastgen\..*", "fastgen.rl.remote")  # without the modules that are not public


def as_list(docstring: str) -> str:
    """Return a docstring whose descriptions of names, each on a line of its own, are a list in Markdown."""
    return re.sub(r"^([a-z]\w*(?:, [a-z]\w*)*): ", r"- `\1`: ", docstring, flags=re.MULTILINE)


def main(folder: Path) -> None:
    warnings.simplefilter("error")  # what cannot be imported or resolved
    for name in fastgen.__all__:
        setattr(fastgen, name, getattr(fastgen, name))  # pdoc does not call the module's __getattr__
    convert = docstrings.convert
    docstrings.convert = lambda text, *args: convert(as_list(text), *args)
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
