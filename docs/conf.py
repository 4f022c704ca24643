"""The site of docs/: `sphinx-build -W docs build/docs`."""

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # docstrings are those of this tree, whatever is installed

project = "jax_wonly"
copyright = "the jax_wonly authors"  # noqa: A001
release = version = re.findall(r'__version__ = "(.+)"', (ROOT / "jax_wonly/_version.py").read_text())[0]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say which types and shapes
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # several names may share a line
napoleon_use_rtype = False

# Every reference to this package must lead somewhere; those to others are text.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!jax_wonly\.).*"), (r"py:class", r"jax_wonly\._.*")]

html_theme = "furo"
html_title = f"jax_wonly {release}"
html_copy_source = False


def setup(app):
    def signature(app, what, name, value, options, arguments, returns):
        if what != "class" or not arguments:
            return None
        if "__init__" in vars(value) and arguments == "(*args, **kwargs)":  # the metaclass of Flax nnx hides it
            own = inspect.signature(value.__init__)
            shown = [p.replace(annotation=p.empty) for p in list(own.parameters.values())[1:]]
            arguments = str(own.replace(parameters=shown, return_annotation=own.empty))
        # Defaults that are functions and types: their names alone.
        arguments = re.sub(r"\.<locals>\.\w+", "", arguments)
        return re.sub(r"<(?:class '[\w.]*?(\w+)'|function (\w+)[^>]*|[^>]*)>", r"\1\2", arguments), returns

    app.connect("autodoc-process-signature", signature)
