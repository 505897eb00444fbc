"""Hooks of mkdocs: the site also has README.md, CONTRIBUTING.md, CHANGELOG.md and a notebook.

Links are written for the repository; on the site, links to files that are no pages become names.
"""

import json
import re
from pathlib import Path
from posixpath import join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/python.ipynb": "python.md",
}
"""Files of the repository, and pages of the site."""
LIST = re.compile(r"^(?![-*|>\s]|\d+\.|```|$)(.+)\n(?=- |\d+\. )", re.MULTILINE)
"""The line before a list that begins without a blank line, as GitHub allows."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = notebook_page(text) if name.endswith(".ipynb") else text
        text = text.replace("](docs/python.ipynb", "](python.md").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def notebook_page(notebook: str) -> str:
    """Markdown of a notebook: its text, code, printed lines and pictures."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            shown = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in shown:
                picture = "".join(shown["image/png"].split())
                parts.append(f"![](data:image/png;base64,{picture})")
            else:
                parts.append(f"```text\n{''.join(shown['text/plain']).strip()}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site, and begin lists where GitHub begins them."""
    markdown = LIST.sub(r"\1\n\n", markdown)
    return LINK.sub(lambda link: site_link(link, page.file.src_uri in PAGES.values()), markdown)


def site_link(link: re.Match[str], is_at_root: bool) -> str:
    """The link to a page, or the name of a file that is none.

    `[site](../slurm/env.sh)` -> `site` (`slurm/env.sh`)
    """
    text, target, heading = link[1], link[2], link[3] or ""
    if is_at_root and not (ROOT / target).exists():
        return link[0]  # was below docs/
    path = normpath(target if is_at_root else join("docs", target))
    if path in PAGES:
        return f"[{text}]({PAGES[path]}{heading})"
    if path.startswith("docs/"):
        return f"[{text}]({relpath(path, 'docs')}{heading})"
    return text if path in text else f"{text} (`{path}`)"
