"""Chats on the standard library: its functions as questions, their docstrings as answers, packed, on 2 processes.

    colossus data show configs/sft_chat.py --rows 2
    colossus launch configs/sft_chat.py
    colossus generate sft_chat --prompt "<user>def is_dir(self):<end><assistant>" --max-tokens 80

The loss is that of the answers alone. From a model that has learnt the text: checkpoint.weights=RUN, of a run of
configs/gpt_packed.py model.seq_len=256. A folder of Hugging Face: model = dict(type="hf", path=..), and no template.
Adapters in place of all weights: model.lora.rank=8 model.lora.alpha=16.
"""

import ast
from collections.abc import Iterator

from colossus.data import BadRow, Piece, RowSource, StdlibFiles

_TEMPLATE = """\
{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


class DocumentedFunctions(RowSource):
    """Chats of one question, the head of a function, and its answer, the first paragraph of its docstring."""

    def __init__(self, most: int = 250) -> None:
        self.files, self.most = StdlibFiles(), most
        self.name, self.fingerprint = "DocumentedFunctions", f"1 {most} {self.files.fingerprint}"

    def pieces(self) -> list[Piece]:
        return [Piece("DocumentedFunctions", 0, 1)]

    def read(self, piece: Piece) -> Iterator[tuple[int, dict | BadRow]]:
        number = 0
        for part in self.files.pieces():
            for _, row in self.files.read(part):
                assert not isinstance(row, BadRow)
                for question, answer in documented(row["text"]):
                    if len(question) + len(answer) <= self.most:
                        number += 1
                        messages = [("user", question), ("assistant", answer)]
                        yield number, {"messages": [dict(role=role, content=text) for role, text in messages]}


def documented(text: str) -> Iterator[tuple[str, str]]:
    """Yield the head of each function that has a docstring, and the first paragraph of that."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the last file is cut off
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            yield f"def {node.name}({ast.unparse(node.args)}):", " ".join(docstring.split("\n\n")[0].split())


parallel = dict(data=2)
model = dict(
    type="GPT", num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, seq_len=256, positions="rotary",
    norm="rmsnorm", mlp="swiglu",
)  # fmt: skip
_chats = dict(type="Chat", source=dict(type=DocumentedFunctions), template=_TEMPLATE, skip=["empty"])
data = dict(type="Packed", source=_chats, long="skip")
optimizer = dict(type="AdamW", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=20, min_ratio=0.05)
train = dict(steps=200, global_batch_size=16, clip_grad_norm=1.0, eval_every=50, seed=0)
