"""Name -> class tables: registering, finding, building, and what is said when a name is wrong."""

# configs are written with dict(...), and so are the tests of them

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
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


def test_the_class_name_is_the_default_name(fruits: Registry) -> None:
    assert fruits.get("Apple") is Apple
    assert "Apple" in fruits
    assert "apple" not in fruits


def test_a_given_name_wins() -> None:
    registry = Registry("fruit")
    assert registry.register("pomme")(Apple) is Apple
    assert registry.names() == ["pomme"]


def test_builtin_is_imported_on_first_use(fruits: Registry) -> None:
    from fractions import Fraction

    assert fruits.names() == ["Apple", "Fraction"]
    assert fruits.get("Fraction") is Fraction


def test_listing_names_imports_no_builtin() -> None:
    code = "import sys; from colossus.registry import MODELS; print('GPT' in MODELS, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True False"


def test_duplicate_names_both_homes(fruits: Registry) -> None:
    def other() -> None: ...

    with pytest.raises(ValueError, match=r"fruit 'Apple' is registered twice: by .*:Apple and by .*other.*other_name"):
        fruits.register("Apple")(other)
    assert fruits.get("Apple") is Apple


def test_the_same_class_may_be_registered_again(fruits: Registry) -> None:
    fruits.register()(Apple)  # as when a config file is run twice


def test_builtin_cannot_be_taken(fruits: Registry) -> None:
    with pytest.raises(ValueError, match=r"'Fraction' is a built-in \(fractions:Fraction\).*another name"):
        fruits.register("Fraction")(Apple)


def test_nameless_entry(fruits: Registry) -> None:
    with pytest.raises(ValueError, match=r"needs a name: use register\('name'\)"):
        fruits.register()(3)


def test_missing_names_the_nearest_and_all(fruits: Registry) -> None:
    with pytest.raises(ValueError, match=r"no fruit named 'aple'\. Did you mean 'Apple'\? Known: Apple, Fraction\."):
        fruits.get("aple")
    with pytest.raises(ValueError, match=r"^no fruit named 'zzzz'\. Known: Apple, Fraction\.$"):
        fruits.get("zzzz")
    assert Registry("stone").missing("x") == "no stone named 'x'. Known: none."


def test_build(fruits: Registry) -> None:
    built = fruits.build(dict(type="Apple", weight=3), color="green")
    assert (built.weight, built.color) == (3, "green")
    assert fruits.build(dict(type=Apple, weight=2)).weight == 2
    assert fruits.build(Apple, color="blue").color == "blue"


def test_build_leaves_the_spec_alone(fruits: Registry) -> None:
    spec = dict(type="Apple", weight=3)
    fruits.build(spec)
    assert spec == dict(type="Apple", weight=3)


def test_build_without_type(fruits: Registry) -> None:
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


@given(st.lists(st.text("abcxyz", min_size=1, max_size=8), min_size=1, unique_by=str.lower))
def test_a_known_name_is_its_own_nearest(known: list[str]) -> None:
    for name in known:
        assert nearest(name, known) == name
        assert nearest(name.upper(), known) == name
