"""Tasks of EleutherAI's lm-eval harness on a checkpoint, under any plan: the three methods of its class ``LM``.

It was written for the documented interface (`lm_eval.api.model.LM`): a request's ``args`` are (context, continuation),
(text,), or (context, options of generation).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from colossus.arithmetic import round_up
from colossus.inference.config import Sampling
from colossus.inference.decoding import Decoding
from colossus.inference.generated_text import Tokenizer
from colossus.inference.model import TextModel

#: a row of ids, and the number of its last ones that are scored
Row = tuple[Sequence[int], int]
#: tokens of a continuation between two looks for the texts that end it
_CHUNK = 32


def evaluate_tasks(model: HarnessModel, tasks: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return the results that ``lm_eval.simple_evaluate`` has for a model by task; it takes the options."""
    base = importlib.import_module("lm_eval.api.model").LM
    both = type("ColossusLM", (HarnessModel, base), {"__init__": lambda self: base.__init__(self)})()
    vars(both).update(vars(model))
    results: dict[str, Any] = importlib.import_module("lm_eval").simple_evaluate(both, tasks=list(tasks), **options)
    return results["results"]


class HarnessModel:
    """The methods of ``lm_eval.api.model.LM``.

    Args:
        call: ``call(work)`` returns ``work(model)`` of the first rank, with the `TextModel` of each.
        tokenizer: tokenizer of the checkpoint.
        length: the most tokens of a forward; what is before them is left out.
        batch_size: rows of a forward.
    """

    def __init__(
        self, call: Callable[[Callable[[TextModel], Any]], Any], tokenizer: Tokenizer, length: int, batch_size: int
    ) -> None:
        self._call, self._tokenizer, self._length, self._batch_size = call, tokenizer, length, batch_size
        #: the ids before a text: those of the tokenizer, or the end of a text, as lm-eval has it
        self._start = tokenizer.encode("") or [min(tokenizer.stop, default=0)]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and whether it is the greedy continuation."""
        rows: list[Row] = []
        for context, continuation in (request.args for request in requests):
            text = context.rstrip()  # blanks belong to the word behind them
            whole = self._tokenizer.encode(context + continuation)
            whole = whole if text else self._started(whole)
            context_length = len(self._tokenizer.encode(text) if text else self._start)
            rows.append((whole[-self._length - 1 :], min(len(whole) - context_length, self._length)))
        return self._scores(rows)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each text, whose windows have as much context as there is."""
        windows = [list(self._windows(self._tokenizer.encode(request.args[0]))) for request in requests]
        scores = iter(self._scores([row for of_text in windows for row in of_text]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the continuation of each context up to the first of the texts ``until``."""
        return [self._continued(*request.args) for request in requests]

    def _windows(self, ids: Sequence[int]) -> Iterator[Row]:
        ids = self._started(ids)
        for start in range(len(self._start), len(ids), self._length):
            stop = min(start + self._length, len(ids))
            yield ids[max(0, stop - self._length - 1) : stop], stop - start

    def _started(self, ids: Sequence[int]) -> list[int]:
        return [*ids] if [*ids[: len(self._start)]] == self._start else [*self._start, *ids]

    def _scores(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of the scored ids of each row, and whether each is the likeliest."""
        order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]), reverse=True)
        scores: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self._batch_size):
            numbers = order[start : start + self._batch_size]
            of_batch = self._call(partial(scored, rows=[rows[number] for number in numbers]))
            scores |= dict(zip(numbers, of_batch, strict=True))
        return [scores[number] for number in range(len(rows))]

    def _continued(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else [*until]
        most = int(options.get("max_gen_toks", 256))
        temperature = float(options.get("temperature") or 0.0)
        sampling = Sampling(greedy=True)
        if options.get("do_sample") and temperature:
            top_k, top_p = options.get("top_k"), options.get("top_p", 1.0)
            sampling = Sampling(temperature, top_k, top_p)
        prompt = self._tokenizer.encode(context)[-max(1, self._length - most) :] or self._start
        new, text = list[int](), ""
        while len(new) < most:
            wanted = min(_CHUNK, most - len(new))
            ends = self._tokenizer.stop
            further: dict[str, Any] = dict(sampling=sampling, stop=ends, num_ids=self._tokenizer.num_ids)
            more = self._call(partial(continued, prompt=[*prompt, *new], max_tokens=wanted, **further))
            new += more
            text = self._tokenizer.decode([token for token in new if token not in ends])
            if len(more) < wanted or new[-1] in ends or any(stop in text for stop in until):
                break
        return _cut(text, until)


def _cut(text: str, until: Iterable[str]) -> str:
    """Return the text before the first of these texts in it."""
    return text[: min((text.index(stop) for stop in until if stop and stop in text), default=len(text))]


def scored(model: TextModel, rows: Sequence[Row]) -> list[tuple[float, bool]]:
    """Return the log-likelihood of the scored ids of each row, and whether each is the likeliest. Collective."""
    count, longest = round_up(len(rows), model.row_multiple), max(2, *(len(ids) for ids, _ in rows)) - 1
    inputs, targets = torch.zeros(count, longest).long(), torch.full((count, longest), -1)
    for number, (ids, last) in enumerate(rows):
        inputs[number, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[number, len(ids) - 1 - last : len(ids) - 1] = torch.tensor(ids[len(ids) - last :])
    logits = model.logits(inputs, only_last=False)
    sums = greedy = None
    if logits is not None:
        own = targets[model.rows(count)].to(logits.device)
        values = logits.double().log_softmax(-1).gather(-1, own.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        sums = (values * (own >= 0)).sum(-1).view(torch.int64)  # bits: `agree` has integers
        greedy = ((logits.argmax(-1) == own) | (own < 0)).all(-1).long()
    agreed_sums = model.agree(count, sums).view(torch.float64).tolist()
    agreed = model.agree(count, greedy).bool().tolist()
    return [*zip(agreed_sums, agreed, strict=True)][: len(rows)]


def continued(model: TextModel, prompt: Sequence[int], **options: Any) -> list[int]:
    """Return the tokens behind a prompt; the options are those of `Decoding`. Collective."""
    decoding = Decoding(model, [prompt], **options)
    while not decoding.is_done:
        decoding.step()
    return decoding.tokens[0][len(prompt) :]
