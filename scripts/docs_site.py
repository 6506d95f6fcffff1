"""Hook of mkdocs (mkdocs.yml names it): pages that are not in docs/, links between them, and a check of every link.

README.md, CONTRIBUTING.md, CHANGELOG.md, policies and the README.md of benchmarks/ and examples/ become pages, and so
do linked programs and notebooks. Other linked files of the repository are copied. A page of api/ lists the public names
of one module. The built pages must load nothing from another host, and each of their links and anchors must exist.
"""

from __future__ import annotations

import ast
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "benchmarks/README.md": "comparisons.md",
    "examples/README.md": "examples/index.md",
}
"""Pages outside of docs/, and their names on the site."""

STYLE = """.md-grid { max-width: 1300px; }
.md-typeset table:not([class]) { font-size: .68rem; }
@media (min-width: 60em) { .md-typeset table:not([class]) code { white-space: nowrap; } }
.md-typeset .doc-contents { border-left: .1rem solid var(--md-default-fg-color--lightest); padding-left: .8rem; }
.doc-section-title { font-weight: 600; }
"""

_LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")
_ATTRIBUTE = re.compile(r'(\b(?:src|srcset|href)=")([^"#]+)((?:#[^"]*)?")')


def api_modules() -> list[str]:
    """Return the modules whose names mkdocs.yml lists under "API reference"."""
    return re.findall(r"api/([\w.]+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def public_names(module: str) -> list[str]:
    """Return the functions, classes and values in `__all__` of a module of the package, without importing it."""
    path = ROOT.joinpath("src", *module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    names: set[str] = set()
    modules = {"__version__"}  # has nothing to say
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__":
            names = set(ast.literal_eval(statement.value))
        elif isinstance(statement, ast.ImportFrom) and statement.module == module:
            modules |= {alias.name for alias in statement.names}
    if not names:
        raise PluginError(f"{module} has no __all__")
    return sorted(names - modules, key=str.lower)


def api_page(module: str) -> str:
    """Return the page of a module; names that are modules have pages of their own."""
    members = "".join(f"\n        - {name}" for name in public_names(module))
    return f"# {module}\n\n::: {module}\n    options:\n      members:{members}\n"


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its text, its code and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            shown = "".join(output["text"] if "text" in output else output["data"]["text/plain"]).rstrip()
            parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not in docs/, starting from those that a page links to."""
    files.append(File.generated(config, "site.css", content=STYLE))
    for name in api_modules():
        files.append(File.generated(config, f"api/{name}.md", content=api_page(name)))
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for file in list(files.documentation_pages()):
        for link in (_LINK, _ATTRIBUTE):
            for _, target, _ in link.findall(_outside_of_code(file.content_string)):
                path = _repository_path(file.src_uri, target)
                if path is None or (name := _site_name(path)) in files.src_uris:
                    continue
                if not (ROOT / path).is_file():
                    raise PluginError(f"{file.src_uri} links to {target}, which does not exist")
                if path.endswith(".py"):
                    code = (ROOT / path).read_text(encoding="utf-8")
                    files.append(File.generated(config, name, content=f"# {path}\n\n```python\n{code}```\n"))
                elif path.endswith(".ipynb"):
                    files.append(File.generated(config, name, content=notebook_page(ROOT / path)))
                else:
                    files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = PurePosixPath(page.file.src_uri).parent

    def replaced(match: re.Match[str], html: bool) -> str:
        path = _repository_path(page.file.src_uri, match[2])
        if path is None:
            return match[0]
        name = _site_name(path)
        if html:  # mkdocs itself replaces those in Markdown
            name = re.sub(r"\.md$", ".html", name)
        return f"{match[1]}{os.path.relpath(name, here)}{match[3]}"

    markdown = _LINK.sub(lambda match: replaced(match, False), markdown)
    return _ATTRIBUTE.sub(lambda match: replaced(match, True), markdown)


def _outside_of_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _repository_path(page: str, target: str) -> str | None:
    """Return the file of the repository that a page links to; None if the link leads elsewhere."""
    if not target or urlsplit(target).scheme or page.startswith("api/"):
        return None
    origin = next((source for source, name in PAGES.items() if name == page), f"docs/{page}")
    return os.path.normpath(os.path.join(os.path.dirname(origin), target))


def _site_name(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("examples/"):
        return re.sub(r"(\.py|\.ipynb)$", ".md", path)
    return path.removeprefix("docs/")


class PublicNames(griffe.Extension):
    """Prepares the package for the API pages.

    The Python sessions and formulas of docstrings become code: `>>>` alone would be a quotation in Markdown, and the
    asterisks of a formula emphasis. A function with the name of its module, like `ops.gelu`, takes the module's
    position, as at run time.
    """

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Put fences around the sessions and formulas of an object's docstring."""
        if obj.docstring:
            obj.docstring.value = _fenced(_formulas_fenced(obj.docstring.value))

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Replace modules by the functions of the same name."""
        loader.resolve_aliases()
        for path in api_modules():
            module = pkg[path.partition(".")[2]] if "." in path else pkg
            for name in public_names(path):
                if (member := module.members[name]).is_module:
                    found = member[name]
                    target = found.final_target if found.is_alias else found
                    self.on_object(obj=target, loader=loader)  # the loader does not follow an alias
                    module.members[name] = griffe.Alias(name, target, parent=module)


def _formulas_fenced(text: str) -> str:
    """Put fences around the paragraphs of equations, such as y = x * w + b."""
    paragraphs = text.split("\n\n")
    for place, paragraph in enumerate(paragraphs[1:], 1):
        lines = re.split(r"\n| {4,}(?=\S)", paragraph.strip("\n"))
        if all(re.match(r"\S.*? = \S", line) for line in lines) and not lines[-1].endswith("."):
            paragraphs[place] = "\n".join(["```text", *lines, "```"])
    return "\n\n".join(paragraphs)


def _fenced(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        begins = line.lstrip().startswith(">>> ")
        if begins and not inside:
            indent = line[: len(line) - len(line.lstrip())]
            lines += ["", f"{indent}```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append(f"{indent}```")
            inside = False
        lines.append(line)
    if inside:
        lines.append(f"{indent}```")
    return "\n".join(lines)


class _Links(HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = re.findall(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]+)", text)
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in ("a", "area"):
            self.links += [values["href"]] if "href" in values else []
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(values.get("href", ""))
        self.loads += [values[name].split()[0] for name in ("src", "srcset", "data") if values.get(name)]


def on_post_build(config: MkDocsConfig) -> None:
    """Check every link, anchor and loaded file of the built pages."""
    site = Path(config.site_dir)
    pages = {path: _Links(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are from the root of a server
        for target in page.links + page.loads:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https") or parts.netloc:
                if target in page.loads:
                    wrong.append(f"{path.relative_to(site)} loads {target} from another host")
                continue
            if parts.scheme:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                wrong.append(f"{path.relative_to(site)} links to {target}, which does not exist")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
                wrong.append(f"{path.relative_to(site)} links to {target}, which has no such anchor")
    for module in api_modules():
        known = pages[site / "api" / f"{module}.html"].anchors
        wrong += [f"{module}.{name} has no entry" for name in public_names(module) if f"{module}.{name}" not in known]
    for style in site.rglob("*.css"):
        for target in re.findall(r"url\([\"']?((?:https?:)?//[^\"')]+)", style.read_text(encoding="utf-8")):
            wrong.append(f"{style.relative_to(site)} loads {target} from another host")
    if wrong:
        raise PluginError("\n".join(["links of the site:", *wrong]))
