"""The picture of differences by module."""

from __future__ import annotations

import math

from colossus.verify.difference_picture import picture
from colossus.verify.step_comparison import Difference


def difference(name: str, relative: float, bound: float = 1e-5) -> Difference:
    return Difference("gradient", 1, name, relative, bound)


def test_each_module_has_its_worst_beside_what_rounding_explains() -> None:
    lines = picture(
        [
            difference("embedding.weight", 1e-7),
            difference("blocks.0.mlp.up.weight", 1e-7),
            difference("blocks.0.mlp.up.bias", 0.5),
            difference("blocks.1.mlp.up.weight", math.inf),
            difference("norm.weight", 0.0),
        ]
    )
    names, numbers = zip(*(line.split()[:2] for line in lines), strict=True)
    assert names == ("embedding", "blocks.0.mlp.up", "blocks.1.mlp.up", "norm")
    assert numbers == ("1e-07", "0.5", "other", "0")
    marks = {line.index("|") for line in lines}
    assert len(marks) == 1
    ends = [line.rindex("#") if "#" in line else 0 for line in lines]
    (mark,) = marks
    assert ends[0] < mark < ends[1] < ends[2]
    assert ends[3] < ends[0]


def test_what_is_no_number_is_the_worst_and_what_is_equal_is_not() -> None:
    lines = picture(
        [
            difference("up.weight", math.nan),
            difference("up.bias", 1e-7),
            difference("ids.weight", 0.0, bound=0.0),
            difference("ids.bias", 1e-9, bound=0.0),
        ]
    )
    assert [line.split()[:2] for line in lines] == [["up", "other"], ["ids", "1e-09"]]


def test_names_are_as_deep_as_there_is_room_for() -> None:
    of_parameters = [
        difference(f"blocks.{block}.{part}.weight", 0.5 if (block, part) == (30, "up") else 1e-7)
        for block in range(40)
        for part in ("up", "down")
    ]
    lines = picture([difference("embedding.weight", 1e-7), *of_parameters])
    assert lines[1].startswith("blocks.0 ")  # 41 modules at this depth, and only two above
    assert next(line for line in lines if "0.5" in line).startswith("blocks.30 ")
    assert lines[-1] == "and 17 more, which differ less"
    wide = picture([difference(f"layer{number}.weight", 1e-7 * number) for number in range(40)])
    assert len(wide) == 25
    assert wide[-1] == "and 16 more, which differ less"
    assert wide[0].startswith("layer16 ")
    assert picture([difference("", 0.5)]) == []
