"""`colossus verify` agrees on every model that README.md and docs/*.md show."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
from helpers.long import long
from helpers.verified import Verify

import colossus

ROOT = Path(colossus.__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: (page, class) -> its call on x [batch, 6, 16], or ids [batch, 6] below 11
CALLS = {
    ("README.md", "Net"): "example(x.repeat(1, 1, 32))",
    ("migration.md", "Net"): "example(x)",
    ("migration.md", "SelfAttention"): "example(x)",
    ("migration.md", "CrossAttention"): "example(x, x[:, 2:], ids[:, None, None, 2:] != 3)",
    ("migration.md", "Pair"): "example(x)",
    ("migration.md", "Tied"): "layers.to_whole(example(ids))",
    ("own-loop.md", "Net"): "example(x)",
    ("tutorial.md", "Net"): "example(x[..., :2])",
    ("weights-and-hooks.md", "Net"): "example(x)",
    ("weights-and-hooks.md", "Pretrained"): "example(x)",
    ("weights-and-hooks.md", "Changed"): "example(x)",
    ("weights-and-hooks.md", "Recomputed"): "example(x)",
}
#: what is no model by itself, and what is compared with plain torch by tests/layers/test_samples.py
PARTS = {("weights-and-hooks.md", "Adapter"), ("other-samples.md", "Contrastive")}
MODEL = """
class Examples(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.examples = nn.ModuleDict({{{made}}})

    def forward(self, ids):
        ids = ids % 11
        x = self.table(ids)
        outputs = []
        for example, call in zip(self.examples.values(), [{calls}], strict=True):
            outputs.append(call(example, x, ids).flatten(2))
        return torch.cat(outputs, -1)

    def loss(self, outputs, batch):
        return outputs.sin().square().sum(), len(outputs)

model = dict(type=Examples)
data = dict(type=_Tokens)
optimizer = dict(type="SGD", lr=0.1)
train = dict(steps=3, global_batch_size=8)
"""


def statements(page: Path) -> list[ast.stmt]:
    """Imports and classes in the Python of a page, in its order."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    whole = [
        block for block in blocks if re.search("^(import|from|class) ", block, re.MULTILINE)
    ]  # others have ellipses
    found = [each for block in whole for each in ast.parse(block).body]
    return [each for each in found if isinstance(each, (ast.Import, ast.ImportFrom, ast.ClassDef))]


def models(page: Path) -> list[str]:
    """Classes with a forward."""
    return [
        each.name
        for each in statements(page)
        if isinstance(each, ast.ClassDef)
        and any(isinstance(part, ast.FunctionDef) and part.name == "forward" for part in each.body)
    ]


def config_text() -> str:
    """All of them side by side in one model."""
    text, made, calls = "", [], []
    for number, page in enumerate(PAGES):
        names = [name for name in models(page) if (page.name, name) in CALLS]
        if not names:
            continue
        body = "\n".join(ast.unparse(each) for each in statements(page))
        text += f"\ndef page_{number}():\n{textwrap.indent(body, '    ')}\n    return locals()\n"
        made += [f"'{page.stem}_{name}': page_{number}()['{name}']()" for name in names]
        calls += [f"lambda example, x, ids: {CALLS[page.name, name]}" for name in names]
    return text + MODEL.format(made=", ".join(made), calls=", ".join(calls))


def test_every_model_of_the_pages_is_verified() -> None:
    assert {(page.name, name) for page in PAGES for name in models(page)} == CALLS.keys() | PARTS


@pytest.mark.parametrize(
    "words",
    [["parallel.tensor=2"], ["parallel.tensor.mode=2d", "parallel.tensor.size=4"], *long(["parallel.data=2"])],
    ids=" ".join,
)
@pytest.mark.rest("parallel.tensor.mode=2d parallel.tensor.size=4")
def test_the_models_of_the_pages_agree(verify: Verify, words: list[str]) -> None:
    code, out, err = verify(config_text(), *words)
    assert code == 0, out + err
