"""The pages of docs/ name what there is."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
from helpers.page_links import calls_of_a_step, links
from helpers.ranks import run_ranks

# -- docs/one-train-step.md, CONTRIBUTING.md ----------------------------------------------------------------

ROOT = Path(__file__).parents[1]
LINKS = links("one-train-step")


def _called(rank: int) -> list[str]:
    """The linked functions in the order in which a step calls them first."""
    optimizer = dict(type="SGD", lr=0.1)
    return calls_of_a_step(rank, LINKS, lambda engine: engine.train_step(torch.ones(2, 6)), optimizer=optimizer)


def test_a_step_calls_what_the_page_links_in_its_order() -> None:
    assert LINKS
    for called in run_ranks(4, _called, with_context=False):
        assert called == [name for name, _ in LINKS]


def test_recipes_name_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipes = re.findall(r"\n\*\*(an? [\w' -]+)\*\*: (.*?)\n(?=\n)", text, re.S)
    assert recipes
    for title, recipe in recipes:
        for path in re.findall(r"`((?:colossus|tests|docs)/[\w/.-]+)`", recipe):
            assert (ROOT / path).exists(), f"{title}: {path}"


def test_places_of_the_architecture_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    places = text[text.index("## Where is") : text.index("## Rooms")]
    rows = [line for line in places.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        for path in re.findall(r"`([\w/]+(?:\.py|/))`", row):
            assert (ROOT / "colossus" / path).exists() or (ROOT / path).exists(), path


# -- README.md, the reference -------------------------------------------------------------------------------


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_their_script_draws() -> None:
    """All but those of matplotlib, which another version draws with other bytes."""
    pictures = _script("make_pictures")
    for name, text in pictures.drawings().items():
        assert (pictures.FOLDER / name).read_text() == text, f"python docs/make_pictures.py draws {name} anew"


def test_reference_pages_have_every_public_name_and_command(tmp_path: Path) -> None:
    """A public name that moved without its package knowing fails here."""
    _script("make_reference").write(tmp_path)
    assert ".. autoclass:: colossus.layers.Linear" in (tmp_path / "layers.md").read_text()
    assert "`--rdzv-endpoint HOST:PORT`" in (tmp_path / "command-line.md").read_text()
    assert "`parallel.tensor.sequence_sharded`" in (tmp_path / "config.md").read_text()


# -- links, messages ----------------------------------------------------------------------------------------


def test_links_and_pictures_of_the_pages_are_there_on_github() -> None:
    assert _script("check_links").markdown_problems() == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    checker = _script("check_links")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("made/\n")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a.svg").write_text("<svg/>")
    (tmp_path / "other.md").write_text("# One `word`, and more\n\n## One `word`, and more\n")
    page = "[](other.md) [x](other.md#one-word-and-more-1) `[x](code.md)` [x](https://example.org)\n```\n[x](code.md)\n```\n"
    (tmp_path / "page.md").write_text(page)
    assert checker.markdown_problems(tmp_path) == []
    (tmp_path / "page.md").write_text(page + "[x](other.md#two) ![p](made/a.svg)\n[x](gone.md)\n")
    assert checker.markdown_problems(tmp_path) == [
        "page.md:5: other.md#two: no such heading",
        "page.md:5: made/a.svg: git ignores it",
        "page.md:6: gone.md: no such file",
    ]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text('<a id="top" href="#top"></a><a href="#end"></a><img src="p.svg">')
    problems = checker.site_problems(tmp_path / "site")
    assert problems == ["index.html: #end: no such anchor", "index.html: p.svg: no such file"]


def test_messages_of_the_page_on_trouble_are_those_of_the_code() -> None:
    """``..`` stands for what a message fills in."""
    quoted = re.findall(r"^> `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(quoted) >= 20
    pieces = [
        node.value
        for file in (ROOT / "colossus").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for message in quoted:
        for part in filter(None, map(str.strip, message.split(".."))):
            assert any(part in piece for piece in pieces), f"no message of the package has {part!r}"


def test_ratios_at_a_glance_are_those_of_the_pages_behind_them() -> None:
    glance = (ROOT / "docs" / "benchmarks.md").read_text().split("## At a glance")[1].split("\n## ")[0]
    pages = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("speed-of-a-step", "speed-around-a-step"))
    ratios = re.findall(r"\d\.\d{3}(?: \[[\d., ]+\])?", glance)
    assert len(ratios) >= 8
    assert [ratio for ratio in ratios if ratio not in pages] == []
    rounded_row = re.search(r"\| time / torch's \| (.*) \|", (ROOT / "README.md").read_text())
    assert rounded_row is not None
    for rounded, ratio in zip(rounded_row[1].split(" | "), ratios[:4] + ratios[5:6], strict=True):
        assert abs(float(rounded) - float(ratio[:5])) < 0.0051
