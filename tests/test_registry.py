"""Name -> class tables: registering, finding, building, and what is said when a name is wrong."""

from __future__ import annotations

import importlib
import re
import textwrap
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.registry import Registry, nearest


class Apple:
    def __init__(self, weight: int = 1, color: str = "red") -> None:
        self.weight, self.color = weight, color


@pytest.fixture
def fruits() -> Registry:
    registry = Registry("fruit", {"Fraction": "fractions:Fraction"})
    registry.register()(Apple)
    return registry


def test_names(fruits: Registry) -> None:
    assert fruits.get("Apple") is Apple
    assert fruits.names() == ["Apple", "Fraction"]
    assert fruits.get("Fraction") is Fraction  # imported on first use
    assert "apple" not in fruits
    assert fruits.register("pomme")(Apple) is Apple
    assert "pomme" in fruits
    fruits.register()(Apple)  # as when a config file is run twice


def test_a_name_is_of_one_class(fruits: Registry) -> None:
    def other() -> None: ...

    with pytest.raises(ValueError, match=r"fruit 'Apple' is already .*:Apple: register .*other under another name"):
        fruits.register("Apple")(other)
    assert fruits.get("Apple") is Apple
    with pytest.raises(ValueError, match=r"'Fraction' is already fractions:Fraction: register .*Apple under another"):
        fruits.register("Fraction")(Apple)
    with pytest.raises(ValueError, match=r"needs a name: use register\('name'\)"):
        fruits.register()(3)


def test_missing_names_the_nearest_and_all(fruits: Registry) -> None:
    with pytest.raises(ValueError, match=r"no fruit named 'aple'\. Did you mean 'Apple'\? Known: Apple, Fraction\."):
        fruits.get("aple")
    with pytest.raises(ValueError, match=r"^no fruit named 'zzzz'\. Known: Apple, Fraction\.$"):
        fruits.get("zzzz")


def test_build(fruits: Registry) -> None:
    spec = dict(type="Apple", weight=3)
    built = fruits.build(spec, color="green")
    assert (built.weight, built.color) == (3, "green")
    assert spec == dict(type="Apple", weight=3)
    assert fruits.build(dict(type=Apple, weight=2)).weight == 2
    assert fruits.build(Apple, color="blue").color == "blue"
    with pytest.raises(ValueError, match=r"a fruit needs a 'type'.*'Apple'"):
        fruits.build(dict(weight=3))


def test_every_module_of_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "orchard_for_test"
    package.mkdir()
    code = "from colossus.registry import Registry\nFRUITS = Registry('fruit', package=__name__)\n"
    (package / "__init__.py").write_text(code)
    for name in ("plum", "pear"):
        code = f"""
            from orchard_for_test import FRUITS

            @FRUITS.register("{name}")
            class Fruit{name}: ...
        """
        (package / f"{name}.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    registry = importlib.import_module("orchard_for_test").FRUITS
    assert registry.names() == ["pear", "plum"]
    assert "plum" in registry


PATHS = {
    "fractions:Fractoin": "fractions has no 'Fractoin'; did you mean 'Fraction'?",
    "xml.dmo:Node": "there is no module 'xml.dmo'; did you mean 'xml.dom'?",
    "fractionss:Fraction": "there is no module 'fractionss'; did you mean 'fractions'?",
    "broken_for_test:f": "importing broken_for_test raised RuntimeError: no luck",
    "needing_for_test:f": "needing_for_test cannot be imported: No module named 'nowhere_for_test'",
    "math:pi": "is of type float, which cannot be called",
    "math:": "must be 'package.module:attribute'",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_imported_or_refused_in_words(
    path: str, fruits: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_for_test.py").write_text("raise RuntimeError('no luck')")
    (tmp_path / "needing_for_test.py").write_text("import nowhere_for_test")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"{path!r}") + ".*" + re.escape(PATHS[path])):
        fruits.get(path)
    assert fruits.get("fractions:Fraction.from_float") == Fraction.from_float
    assert fruits.build(dict(type="fractions:Fraction", numerator=3)) == 3
    assert fruits.names() == ["Apple", "Fraction"]
    assert "Did you mean 'fractions:Fraction'?" in fruits.missing("fractions.Fraction")


@given(st.lists(st.text("abcxyz", min_size=1, max_size=8), min_size=1, unique_by=str.lower))
def test_a_known_name_is_its_own_nearest(known: list[str]) -> None:
    for name in known:
        assert nearest(name, known) == name
        assert nearest(name.upper(), known) == name
