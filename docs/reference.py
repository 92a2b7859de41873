"""What `make docs` gives mkdocs: the pages as they lie in the repository, and a reference made from docstrings."""

import importlib
import inspect
import logging
import os
import pkgutil
import re
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("docs/*.md", "examples/**/README.md", "pretrained/**/README.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+")  # to a file or folder, without its anchor
PACKAGES = ["mega_runtime", *(f"mega_fairseq.{name}" for name in ("modules", "models", "tasks", "criterions"))]
CSS = """.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
td code { white-space: nowrap !important; }
.wy-nav-content { max-width: 1000px; }"""  # the theme neither wraps the texts of tables nor leaves them much space
PROPERTIES = (property, cached_property)
MODULES = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)")  # before the names of types in a signature


# ------------------------------------------------------------------------------------------------ hooks of mkdocs


def on_files(files, config):
    """Replaces docs/ by all pages, the files and folders that they link to, and the reference."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    paths = ["README.md", *sorted(str(path.relative_to(ROOT)) for place in PLACES for path in ROOT.glob(place))]
    for path in paths:  # grows
        folder = (ROOT / path).is_dir()
        page = f"{path}/README.md" if folder else path
        if files.get_file_from_path(page):
            continue
        if (ROOT / page).is_file():
            files.append(File(page, str(ROOT), config.site_dir, use_directory_urls=True))
            text = (ROOT / page).read_text(encoding="utf-8") if page.endswith(".md") else ""
            paths += [os.path.normpath(os.path.join(os.path.dirname(page), link)) for link in LINK.findall(text)]
        elif folder:
            names = sorted(each.name for each in (ROOT / path).iterdir() if each.is_file())
            text = "\n".join([f"# {path}\n", *(f"- [{name}]({name})" for name in names)])
            files.append(File.generated(config, page, content=text))
            paths += [f"{path}/{name}" for name in names]
    for name, text in reference().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    files.append(File.generated(config, "tables.css", content=CSS))
    logging.getLogger().setLevel(logging.WARNING)  # a file of fairseq, imported just now, sets DEBUG
    return files


def on_page_markdown(markdown, page, config, files):
    """Makes links to folders, which GitHub shows, links to their pages."""
    folder = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda m: f"{m[0].rstrip('/')}/README.md" if (folder / m[0]).is_dir() else m[0], markdown)


# ------------------------------------------------------------------------------------------------ reference


def reference():
    """The pages of the packages and operators by name; raises if a public name has no docstring."""
    from mega_fairseq import ops

    operators = (name for _, name, package in pkgutil.iter_modules(ops.__path__, "mega_fairseq.ops.") if package)
    packages = [importlib.import_module(name) for name in [*PACKAGES, *operators]]
    pages = {package.__name__: list(entries(package)) for package in packages}
    missing = [title for page in pages.values() for title, _, text in page if not text]
    if missing:
        raise ValueError(f"no docstring: {', '.join(missing)}")
    return {name: "\n\n".join(part for entry in page for part in entry) for name, page in pages.items()}


def entries(package):
    """Title, signature and text of a package, and of the classes, methods and functions that it offers."""
    about = markdown(package.__doc__ or "")
    yield f"# {package.__name__}", "", about
    for name in public(package):
        value = getattr(package, name)
        value = value.naive if type(value).__name__ == "Forms" else value
        title = f"## {name}"
        if inspect.isfunction(value):
            yield title, signature(value, name), described(value)
        elif inspect.isclass(value):
            yield title, signature(value, name), described(value)
            for method, found, text in methods(value):
                yield f"### {name}.{method}", signature(found, method), text
        else:  # a dictionary or type, which the text of the package describes
            content = ", ".join(f"`{each}`" for each in value) if isinstance(value, dict) else f"`{short(value)}`"
            yield title, content, "See above." if f"`{name}`" in about else ""


def public(package):
    """`__all__` of a package, or else the classes and functions from its files; of an operator, its own."""
    mine = re.compile(f"{package.__name__}$" if ".ops." in package.__name__ else f"{package.__name__}[.]")
    return getattr(package, "__all__", None) or [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not name.isupper()
        if mine.match(getattr(value, "__module__", "")) or type(value).__name__ == "Forms"
    ]


def methods(value):
    """Public methods and properties of a class, with their texts; except for configs, those of its bases too."""
    ours = [base for base in value.__mro__ if base.__module__.startswith("mega_")]
    names = [name for base in (ours[:1] if is_dataclass(value) else ours[::-1]) for name in vars(base)]
    for name in dict.fromkeys(names):
        place = next(base for base in ours if name in vars(base))
        method = getattr(vars(place)[name], "__func__", vars(place)[name])  # of a class method
        if not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, PROPERTIES)):
            texts = ((base, getattr(vars(base).get(name), "__doc__", "")) for base in value.__mro__)
            base, text = next(filter(lambda found: found[1], texts), (value, ""))
            yield name, method, markdown(text) if base in ours or not text else f"As `{base.__name__}.{name}`."


def described(value):
    """The docstring of a function or class, and the help texts of a config; nothing if nobody wrote it."""
    text = value.__doc__ or ""
    if text.startswith(f"{value.__name__}("):  # made by dataclass or NamedTuple
        return ""
    helps = ((f.name, f.metadata.get("help")) for f in (fields(value) if is_dataclass(value) else ()))
    return text and "\n".join([markdown(text), "", *(f"- `{name}`: {help}" for name, help in helps if help)])


def markdown(docstring):
    """A docstring in which <unk> is no tag."""
    return re.sub(r"(`[^`]*`)|<(?=[a-z/])", lambda match: match[1] or "&lt;", inspect.cleandoc(docstring))


def signature(value, name):
    """The call of a function or class as code, in lines of one argument if it is long."""
    if isinstance(value, PROPERTIES) or (inspect.isclass(value) and issubclass(value, Exception)):
        return ""
    found = inspect.signature(value)
    text = f"{name}{short(found)}"
    if len(text) > 90:
        arguments = "".join(f"    {short(each)},\n" for each in found.parameters.values())
        text = f"{name}(\n{arguments}{short(found.replace(parameters=[]))[1:]}"
    return f"```python\n{text}\n```"


def short(annotation):
    return MODULES.sub("", str(annotation))
