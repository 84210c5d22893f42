"""Check links, anchors and pictures: of Markdown as GitHub shows it, and of the built site.

    python docs/check_links.py              # README.md, CONTRIBUTING.md, docs/*.md and every other tracked .md
    python docs/check_links.py docs/_build  # and all pages of the site

A link of Markdown must lead to a file that git tracks, since GitHub has no other.
Links to other hosts are not followed.
Exit code 0: nothing is broken; 1: each broken link is a line.
"""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)(`{3,}|~{3,}|:{3,})")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
CODE = re.compile(r"(`+)(?:.(?!\1))*?.\1")


def tracked_files(root: Path) -> set[Path]:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    return {root / name for name in names if name and (root / name).is_file()}


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines outside of code blocks; those of MyST's ``:::`` blocks are prose."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if match and match[2][0] != ":":
            if not fence:
                fence = match[2]
            elif match[2].startswith(fence) and line.strip() == match[2]:
                fence = ""
        elif not fence and not line.startswith("    "):
            yield number, line


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return "".join(c for c in text if c in "-_ " or unicodedata.category(c)[0] in "LN").replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page of Markdown."""
    names: dict[str, int] = {}
    for _, line in prose_lines(page.read_text()):
        if match := re.match(r"#{1,6} +(.*?) *#*$", line):
            name = slug(match[1])
            names[name] = names.get(name, -1) + 1
            if names[name]:
                names[f"{name}-{names[name]}"] = 0
        for identifier in re.findall(r'<a (?:id|name)="([^"]+)"', line):
            names[identifier] = 0
    return frozenset(names)


def markdown_problems(root: Path = ROOT) -> list[str]:
    """Return a line for each link of a tracked page that GitHub would show broken."""
    files = tracked_files(root)
    folders = {parent for file in files for parent in file.parents}
    problems = []
    for page in sorted(file for file in files if file.suffix == ".md"):
        for number, line in prose_lines(page.read_text()):
            targets = LINK.findall(CODE.sub(lambda match: "x" * len(match[0]), line))
            for target in targets + re.findall(r'(?:src|href)="([^"]+)"', line):
                reason = _broken(page, target, files, folders)
                if reason:
                    problems.append(f"{page.relative_to(root)}:{number}: {target}: {reason}")
    return problems


def _broken(page: Path, target: str, files: set[Path], folders: set[Path]) -> str:
    """Return what is wrong with a link, or nothing."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ""
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if path in folders and not parts.fragment:
        return ""
    if path not in files:
        return "git ignores it" if path.exists() else "no such file"
    if parts.fragment and (path.suffix != ".md" or parts.fragment not in anchors(path)):
        return "no such heading"
    return ""


class Page(HTMLParser):
    """The targets and the anchors of a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


def site_problems(site: Path) -> list[str]:
    """Return a line for each link of a built page whose file or anchor does not exist."""
    files = [path for path in sorted(site.resolve().rglob("*.html")) if "_static" not in path.parts]
    pages = {path: Page(path.read_text()) for path in files}
    problems = []
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or target == "#":
                continue
            other = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not other.is_file():
                problems.append(f"{path.relative_to(site.resolve())}: {target}: no such file")
            elif parts.fragment and other in pages and unquote(parts.fragment) not in pages[other].anchors:
                problems.append(f"{path.relative_to(site.resolve())}: {target}: no such anchor")
    return problems


def main(arguments: list[str]) -> int:
    problems = markdown_problems()
    for site in arguments:
        problems += site_problems(Path(site))
    print("\n".join(problems) or "no broken link")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
