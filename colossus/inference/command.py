"""``colossus generate``: text from a checkpoint. No torch until everything that was given is known to be right."""

from __future__ import annotations

import importlib
import json as json_module
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colossus.checkpoint.describe import printable
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.config import Config, ConfigError
from colossus.config.sizes import world_size
from colossus.inference.output import Texts
from colossus.inference.plan import describe, num_positions, plan_config, trained_length, vocabulary_size
from colossus.inference.request import Request
from colossus.inference.sampling_options import Sampling
from colossus.inference.source import Source, find_source
from colossus.inference.tokenizers import Tokenizer, stop_ids, tokenizer_of, without_tokenizer
from colossus.launch.command import worker_variables
from colossus.launch.data_check import is_ours
from colossus.launch.device_check import check_devices
from colossus.launch.model_check import check_model

if TYPE_CHECKING:
    from colossus.inference.ranks import Ranks

DONE, FAILED, USAGE = 0, 1, 2


@dataclass(frozen=True)
class _Work:
    """A request that was found right."""

    source: Source
    config: Config
    sampling: Sampling
    tokenizer: Tokenizer | None
    prompts: Sequence[str] | None
    tokens: Sequence[Sequence[int]]


def run(request: Request) -> int:
    """Generate, and print: text to standard output as it comes, facts to standard error.

    Returns:
        0 done, 1 failed at run time or a damaged checkpoint, 2 wrong usage.
    """
    try:
        if sys.stdout is None:
            raise ConfigError("standard output is closed: there is nowhere to print text to")
        work = _prepare(request)
        check_devices(work.config, world_size(work.config.parallel))
        if world_size(work.config.parallel) > 1:
            importlib.import_module("torch").set_num_threads(1)  # ranks that are forked hang after work on more threads
            check_model(work.config)
    except DamagedCheckpoint as error:
        return _say(str(error), FAILED)
    except (ConfigError, CheckpointError) as error:
        return _say(str(error), USAGE)
    # torch is imported here
    from colossus.context.local_ranks import RanksFailed
    from colossus.inference.decoding import DecodingFailed
    from colossus.inference.ranks import Ranks

    _tell(f"{work.source.folder}: {_describe_model(work)}, {describe(work.config)}")
    try:
        with Ranks(work.source, work.config) as ranks:
            return _generate(request, work, ranks)
    except (RanksFailed, DecodingFailed) as error:
        return _say(f"generate failed: {error}", FAILED)
    except CheckpointError as error:
        return _say(str(error), FAILED if isinstance(error, DamagedCheckpoint) else USAGE)
    except BrokenPipeError:
        raise
    except ValueError as error:
        if not is_ours(error):  # a user's own code, with its traceback
            raise
        return _say(str(error), USAGE)


def _prepare(request: Request) -> _Work:
    if worker_variables(os.environ) is not None:
        raise ConfigError("generate starts its own processes: run it by itself, without torchrun or srun")
    try:
        sampling = Sampling(request.temperature, request.top_k, request.top_p, request.greedy, request.seed)
    except ValueError as error:
        raise ConfigError(str(error).split("\n")) from None
    if request.max_tokens < 1:
        raise ConfigError(f"max_tokens = {request.max_tokens}: at least 1")
    if request.prompts and request.tokens:
        raise ConfigError("--prompt and --tokens: give prompts as text, or as numbers")
    source = find_source(request.checkpoint)
    config = plan_config(source, request.overrides, request.config)
    if request.tokens:
        prompts, tokenizer, tokens = None, None, [list(each) for each in request.tokens]
    else:
        tokenizer = tokenizer_of(source, request.tokenizer)
        if tokenizer is None:
            raise ConfigError(without_tokenizer(source))
        prompts = _read(request.prompts)
        tokens = [tokenizer.encode(each) for each in prompts]
    _check(config, tokens)
    return _Work(source, config, sampling, tokenizer, prompts, tokens)


def _read(prompts: Sequence[str]) -> list[str]:
    """The prompts, with standard input in the place of ``-``, without the newline at its end that ``echo`` adds."""
    if prompts.count("-") > 1:
        raise ConfigError("--prompt - is given twice, but there is one standard input")
    return [_standard_input() if each == "-" else each for each in (prompts or ["-"])]


def _standard_input() -> str:
    if sys.stdin is None:
        raise ConfigError("standard input is closed: give the prompt as --prompt TEXT")
    if sys.stdin.isatty():
        _tell("the prompt is read from here; Ctrl-D ends it (or give --prompt TEXT)")
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    return text.removesuffix("\n")


def _check(config: Config, prompts: Sequence[Sequence[int]]) -> None:
    """That the model has the tokens of the prompts, and positions for them."""
    vocabulary, positions, problems = vocabulary_size(config), num_positions(config), []
    for number, tokens in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not tokens:
            problems.append(f"{which} is empty: a model continues at least one token")
        if positions is not None and len(tokens) > positions:
            problems.append(
                f"{which} has {len(tokens)} tokens, but the model has learned {positions} positions "
                f"(model.seq_len): cut it to {positions}, or less to leave room for text"
            )
        wrong = [each for each in tokens if each < 0 or (vocabulary is not None and each >= vocabulary)]
        if wrong:
            beyond = f"0..{vocabulary - 1}" if vocabulary is not None else "0 and above"
            problems.append(
                f"{which} has the token {wrong[0]}, but the model has the tokens {beyond}: is it the tokenizer that "
                f"made its training data?"
            )
    if problems:
        raise ConfigError(problems)


def _generate(request: Request, work: _Work, ranks: Ranks) -> int:
    if ranks.loaded.why_not_cached:
        _tell(f"whole sequences are computed for each token, without a cache: {ranks.loaded.why_not_cached}")
    length, longest = trained_length(work.config), max(map(len, work.tokens))
    if length is not None and num_positions(work.config) is None and longest + request.max_tokens > length:
        _tell(
            f"warning: up to {longest + request.max_tokens} tokens, but the model was trained on sequences of {length} "
            f"(model.seq_len): text beyond them may be poor"
        )
    if work.tokenizer is not None and work.tokenizer.num_ids > (vocabulary_size(work.config) or 0) > 0:
        _tell(f"the tokenizer has {work.tokenizer.num_ids} tokens, the model {vocabulary_size(work.config)}")
    tokenizer = work.tokenizer
    stop, num_ids = (tokenizer.stop, tokenizer.num_ids) if tokenizer is not None else (stop_ids(work.source), None)
    ranks.begin(work.tokens, max_tokens=request.max_tokens, sampling=work.sampling, stop=stop, num_ids=num_ids)
    texts = Texts(work.prompts, work.tokens, work.tokenizer, is_json=request.json)
    clock = Clock()
    try:
        while None in texts.ended:
            step = ranks.step()
            clock.note(step.fed)
            texts.add(step.tokens, step.ended)
    except BrokenPipeError:
        raise
    except BaseException:  # Ctrl-C, or a failure: what there is is not lost
        texts.stop()
        if request.json:
            _print_json(work, texts, clock)
        _tell(clock.line())
        raise
    if request.json:
        _print_json(work, texts, clock)
    for line in _ends(texts, ranks.loaded.num_positions):
        _tell(line)
    _tell(clock.line())
    return DONE


class Clock:
    """Tokens a second that the model took: those of prompts (prefill), and those that it had made (decode).

    The time of a forward that takes both is shared out by their numbers.
    """

    def __init__(self) -> None:
        self.prefilled = self.decoded = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._since = time.perf_counter()

    def note(self, fed: tuple[int, int]) -> None:
        """A step is done; see `Decoding.fed`."""
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / max(1, sum(fed)), now
        self.prefilled, self.prefill_seconds = self.prefilled + fed[0], self.prefill_seconds + seconds * fed[0]
        self.decoded, self.decode_seconds = self.decoded + fed[1], self.decode_seconds + seconds * fed[1]

    def speeds(self) -> dict[str, float | None]:
        """Tokens per second of all rows together; None where nothing was done."""
        return {
            "prefill_tokens_per_second": self.prefilled / self.prefill_seconds if self.prefill_seconds else None,
            "decode_tokens_per_second": self.decoded / self.decode_seconds if self.decode_seconds else None,
        }

    def line(self) -> str:
        speed = self.speeds()
        parts = [
            f"{name}: {count} token{'s' * (count != 1)}, {speed[f'{name}_tokens_per_second']:.1f} tokens/s"
            for name, count in (("prefill", self.prefilled), ("decode", self.decoded))
            if speed[f"{name}_tokens_per_second"] is not None
        ]
        return "; ".join(parts) or "nothing was generated"


def _ends(texts: Texts, positions: int | None) -> list[str]:
    """Where a text has ended although more was asked for."""
    rows = [row for row, ended in enumerate(texts.ended) if ended == "positions"]
    if not rows:
        return []
    which = "stopped" if len(texts.ended) == 1 else f"prompts {', '.join(str(row + 1) for row in rows)} stopped"
    made = sorted({len(texts.tokens[row]) for row in rows})
    return [
        f"{which} after {' to '.join(map(str, (made[0], made[-1])[: len(made)]))} tokens: the model has learned "
        f"{positions} positions (model.seq_len), and knows none beyond them"
    ]


def _print_json(work: _Work, texts: Texts, clock: Clock) -> None:
    found: dict[str, Any] = {
        "checkpoint": str(work.source.folder),
        "step": work.source.manifest.step,
        "plan": describe(work.config),
        "seed": work.sampling.seed,
        **clock.speeds(),
        "results": texts.as_data(),
    }
    print(json_module.dumps(found, indent=2))


def _describe_model(work: _Work) -> str:
    kind = work.config.model.type if work.config.model is not None else "?"
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)
    return name if work.source.is_foreign else f"{name}, step {work.source.manifest.step}"


def _tell(line: str) -> None:
    if sys.stderr is not None:  # closed: what is printed to None goes to standard output
        print(f"colossus: {printable(line)}", file=sys.stderr, flush=True)


def _say(problem: str, code: int) -> int:
    _tell(problem)
    return code
