"""``colossus generate`` and ``colossus evaluate``. They import torch only after all arguments have been checked."""

from __future__ import annotations

import contextlib
import importlib
import json as json_module
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus.checkpoint.describe import printable
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.config import Config, ConfigError, model_options
from colossus.config.plans import world_size
from colossus.inference.config import (
    Sampling,
    WeightSource,
    describe,
    evaluation_config,
    find_source,
    generation_config,
    num_positions,
    prompt_problems,
    training_data,
)
from colossus.inference.generated_text import Texts, special_ids, tokenizer_of
from colossus.launch.checks import check_data, check_devices, check_model
from colossus.launch.command import worker_variables
from colossus.launch.decide import DONE, FAILED, USAGE

if TYPE_CHECKING:
    from colossus.data.loader import Loaders
    from colossus.engine.results import EvalResult
    from colossus.inference.decoding import Decoding

#: a smaller model gets one thread in one process: its operations are too short to split. The number is fixed, since the
#: threads change the last bits of products, and text must not depend on the load of the machine
_FEW_PARAMETERS = 20_000_000
#: rows of a forward of lm-eval's texts, and tokens where the model has no bound
_HARNESS_ROWS, _HARNESS_TOKENS = 8, 2048


def _exit_code(name: str, work: Callable[[], None]) -> int:
    """Do the work of a command of this name and return its exit code.

    Errors of a user's own code keep their traceback.
    """
    try:
        if worker_variables(os.environ) is not None:
            raise ConfigError(f"{name} starts its own processes: run it by itself, without torchrun or srun")
        work()
    except (DamagedCheckpoint, FloatingPointError) as error:
        return _say(f"{name} failed: {error}", FAILED)
    except (ConfigError, CheckpointError) as error:
        return _say(str(error), USAGE)
    except RuntimeError as error:
        from colossus.context.local_ranks import RanksFailed  # imports torch

        if not isinstance(error, RanksFailed):
            raise
        return _say(f"{name} failed: {error}", FAILED)
    return DONE


def _say(line: str, code: int = DONE) -> int:
    print(f"colossus: {printable(line)}", file=sys.stderr, flush=True)
    return code


def _use_one_thread() -> None:
    """Let this process compute with one thread: ranks that are forked after work on more threads hang."""
    importlib.import_module("torch").set_num_threads(1)


def _title(source: WeightSource) -> str:
    of_average = "" if source.average is None else f", {source.average} of the weights"
    return str(source.folder) if source.is_foreign else f"{source.folder}, step {source.manifest.step}{of_average}"


# -- generate ---------------------------------------------------------------------------------------------


def generate(
    checkpoint: str | Path,
    overrides: Sequence[str] = (),
    *,
    prompts: Sequence[str] = (),
    tokens: Sequence[Sequence[int]] = (),
    max_tokens: int = 256,
    tokenizer: str | None = None,
    config_file: str | None = None,
    average: str | None = None,
    json: bool = False,
    **sampling: Any,
) -> int:
    """Continue prompts: text goes to standard output as it comes, facts to standard error.

    The arguments are those of the command.

    Returns:
        0 done, 1 failed at run time or a damaged checkpoint, 2 wrong usage.
    """

    def work() -> None:
        sampler = Sampling(**sampling)
        if prompts and tokens:
            raise ConfigError("--prompt and --tokens: pass prompts as text, or as numbers, not both")
        source = find_source(checkpoint, average)
        config = generation_config(source, overrides, config_file)
        encoder = None if tokens else tokenizer_of(source, tokenizer)
        texts = None if encoder is None else _read(prompts)
        ids = [list(row) for row in tokens] if encoder is None else [encoder.encode(text) for text in texts or ()]
        vocab_size = getattr(model_options(config), "vocab_size", None)
        if problems := prompt_problems(ids, num_positions(config), vocab_size):
            raise ConfigError(problems)
        check_devices(config, world_size(config.parallel))
        if world_size(config.parallel) > 1:
            _use_one_thread()
            check_model(config)
        _say(f"{_title(source)}: {describe(config)}")
        stop = encoder.stop if encoder is not None else special_ids(source.folder, source.token_ids, "eos_token_id")
        options = {"prompts": ids, "max_tokens": max_tokens, "sampling": sampler, "stop": stop}
        options["num_ids"] = encoder.num_ids if encoder is not None else None
        # torch is imported here
        from colossus.inference.ranks import decoding_of, on_ranks

        sizes = (math.prod(entry.shape) for key, entry in source.manifest.tensors.items() if key.startswith("model/"))
        threads = 1 if world_size(config.parallel) == 1 and sum(sizes) < _FEW_PARAMETERS else None
        with on_ranks(config, partial(decoding_of, source, config, **options), threads) as call:
            call(bool)  # each rank loads the model before anything is printed
            with contextlib.suppress(AttributeError, ValueError):
                sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
            results = Texts(texts, ids, encoder, None if json else sys.stdout)
            try:
                while None in results.ended:
                    results.add(*call(_step))
            finally:  # also after Ctrl-C or a failure, so that the text so far is not lost
                _conclude(results, json, source, config, sampler)

    return _exit_code("generate", work)


def _read(prompts: Sequence[str]) -> list[str]:
    """Return the prompts, with standard input in place of ``-``, without the final newline that ``echo`` adds."""
    if prompts.count("-") > 1:
        raise ConfigError("--prompt - is there twice, but there is one standard input")
    if (not prompts or "-" in prompts) and sys.stdin.isatty():
        _say("the prompt is read from here; Ctrl-D ends it (or pass --prompt TEXT)")
    return [
        sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n") if prompt == "-" else prompt
        for prompt in (prompts or ["-"])
    ]


def _step(decoding: Decoding) -> tuple[list[int | None], list[str | None]]:
    """Return, on a rank, the new token of each row, and the reasons of the rows that have ended."""
    return decoding.step(), decoding.ended


def _conclude(texts: Texts, as_json: bool, source: WeightSource, config: Config, sampling: Sampling) -> None:
    """Print the rest of the texts, or all of them as JSON, with the rows that ended early and the speed."""
    texts.finish()
    speed = texts.tokens_per_second()
    if as_json:
        about = {"checkpoint": str(source.folder), "step": source.manifest.step, "plan": describe(config)}
        results = {"seed": sampling.seed, "tokens_per_second": speed, "results": texts.as_data()}
        print(json_module.dumps({**about, **results}, indent=2))
    for row, ended in enumerate(texts.ended):
        if ended == "positions":
            _say(f"prompt {row + 1} stopped at the last position that the model has learned")
    if speed is not None:
        _say(f"{speed:.1f} tokens/s")


# -- evaluate ---------------------------------------------------------------------------------------------


def evaluate(
    checkpoint: str | Path,
    overrides: Sequence[str] = (),
    *,
    config_file: str | None = None,
    average: str | None = None,
    split: str = "validation",
    nproc: int | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    tokenizer: str | None = None,
    json: bool = False,
) -> int:
    """Evaluate a checkpoint's model on its run's validation data, under its plan; or on tasks of lm-eval.

    The arguments are those of the command.

    Returns:
        0 done, 1 failed at run time or a damaged checkpoint, 2 wrong usage.
    """

    def work() -> None:
        if tasks is not None or limit is not None or fewshot is not None:
            if tasks is None or nproc is not None:
                raise ConfigError(
                    "--limit and --fewshot are of --tasks, and --nproc is not: tasks run in one process, or under a "
                    "plan of overrides (parallel.tensor=2)"
                )
            results = _task_results(
                checkpoint, overrides, config_file, average, tokenizer, tasks, limit=limit, num_fewshot=fewshot
            )
            if json:
                print(json_module.dumps(results, indent=2, default=str))
                return
            for task, numbers in results.items():
                for key, value in numbers.items():
                    print(f"{task:<20} {key:<24} {f'{value:.6g}' if isinstance(value, float) else value}")
            return
        source = find_source(checkpoint, average)
        config = evaluation_config(source, overrides, config_file, nproc=nproc)
        if split == "train":
            config = training_data(config)
        _use_one_thread()
        check_devices(config, world_size(config.parallel))
        check_model(config)
        loaders = check_data(config)
        if loaders is not None and loaders.validation is None:
            raise ConfigError(
                f"there is no {split} data: {loaders.validation_missing}; --split train evaluates the training data"
            )
        # torch is imported here
        from colossus.engine.initialize import make_engine
        from colossus.inference.ranks import on_ranks

        _say(f"{_title(source)}: {describe(config)}")
        if loaders is not None:
            _say(f"{split} data: {loaders.description.partition('; validation: ')[2]}")
        began = time.perf_counter()
        with on_ranks(config, partial(make_engine, config)) as call:
            numbers = _numbers(call(partial(_evaluate, source)), config, loaders)
        numbers["seconds"] = time.perf_counter() - began
        if json:
            about = {"checkpoint": str(source.folder), "step": source.manifest.step, "split": split}
            finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
            print(json_module.dumps({**about, "plan": describe(config), **finite}, indent=2))
            return
        for key, value in numbers.items():
            text = f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if key == "seconds" else f"{value:.6g}"
            print(f"{key.replace('_', ' '):<14} {text}")

    return _exit_code("evaluate", work)


def _task_results(
    checkpoint: str | Path,
    overrides: Sequence[str],
    config_file: str | None,
    average: str | None,
    choice: str | None,
    tasks: str,
    **options: Any,
) -> dict[str, Any]:
    """Return the results of lm-eval by task; the options are those of ``lm_eval.simple_evaluate``."""
    if find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs EleutherAI's lm-eval harness, which is not installed: pip install lm_eval")
    source = find_source(checkpoint, average)
    config, tokenizer = generation_config(source, overrides, config_file), tokenizer_of(source, choice)
    check_devices(config, world_size(config.parallel))
    if world_size(config.parallel) > 1:
        _use_one_thread()
    # torch is imported here
    from colossus.inference.harness import HarnessModel, evaluate_tasks
    from colossus.inference.model import load_model
    from colossus.inference.ranks import on_ranks

    _say(f"{_title(source)}: {describe(config)}")
    length = getattr(model_options(config), "seq_len", None) or _HARNESS_TOKENS
    with on_ranks(config, partial(load_model, source, config)) as call:
        model = HarnessModel(call, tokenizer, length, config.train.eval_batch_size or _HARNESS_ROWS)
        return evaluate_tasks(model, tasks.split(","), **options)


def _evaluate(source: WeightSource, engine: Any) -> EvalResult:
    """Return, on a rank, the evaluation of a source's weights on the validation data, by the engine of its run."""
    engine.checkpoints.load_weights(source.folder, average=source.average)
    result: EvalResult = engine.evaluate()
    return result


def _numbers(summary: EvalResult, config: Config, loaders: Loaders | None) -> dict[str, Any]:
    """Return loss, perplexity, metrics and count; perplexity only if the loss is the mean log-likelihood of tokens."""
    numbers: dict[str, Any] = {"loss": summary.loss}
    options = model_options(config)
    has_more = any(getattr(options, key, None) for key in ("label_smoothing", "z_loss", "objective"))
    if hasattr(options, "vocab_size") and not has_more:
        numbers["perplexity"] = math.exp(summary.loss) if summary.loss < 700 else math.inf
        if loaders is not None and loaders.tokenizer is not None and loaders.tokenizer.name == "bytes":
            numbers["bits_per_byte"] = summary.loss / math.log(2)
    return {**numbers, **summary.metrics, str(getattr(options, "counted", "tokens")): summary.tokens}
