"""Name -> class tables, in which all names of config files are looked up.

Entries are classes registered with the decorator; built-in ones declared as ``"package.module:attribute"`` and imported
on first use, so that listing names imports no torch; and the classes that the modules of ``package`` register. A config
may also write ``"package.module:attribute"`` in place of a name.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from colossus.import_path import imported, is_path

T = TypeVar("T")


def nearest(name: str, names: list[str]) -> str | None:
    """Return the name closest in spelling to ``name``, or None when none is close."""
    folded = {candidate.lower(): candidate for candidate in reversed(names)}
    match = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.5)
    return folded[match[0]] if match else None


class Registry:
    """A table of one kind of thing (models, tensor modes, datasets, ...) by name."""

    def __init__(
        self,
        kind: str,
        builtin: Mapping[str, str] | None = None,
        *,
        package: str | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Make a table.

        Args:
            kind: the kind of its entries, for messages.
            builtin: name -> ``"package.module:attribute"``.
            package: the package whose modules register classes.
            refused: names that people expect -> why there is no such entry, and the alternative.
        """
        self.kind = kind
        self.refused = dict(refused or {})
        self._builtin = dict(builtin or {})
        self._package = package
        self._entries: dict[str, Any] = {}

    def register(self, name: str | None = None) -> Callable[[T], T]:
        """Return a decorator: ``@MODELS.register()`` uses the class name, ``@MODELS.register("gpt")`` another one.

        Raises:
            ValueError: another class already has the name.
        """

        def add(entry: T) -> T:
            key = name if name is not None else getattr(entry, "__name__", None)
            if not isinstance(key, str):
                raise ValueError(f"a {self.kind} needs a name: use register('name')")
            registered = _home(self._entries[key]) if key in self._entries else self._builtin.get(key)
            if registered not in (None, _home(entry)):
                raise ValueError(
                    f"{self.kind} {key!r} is already {registered}: register {_home(entry)} under another name, "
                    f"register('other_name')"
                )
            self._entries[key] = entry
            return entry

        return add

    def names(self) -> list[str]:
        """Return every name, sorted; no built-in class is imported."""
        self._scan()
        return sorted(set(self._builtin) | set(self._entries))

    def __contains__(self, name: object) -> bool:
        self._scan()
        return name in self._entries or name in self._builtin

    def get(self, name: str) -> Any:
        """Return the class of a name, or of a ``"package.module:attribute"``.

        Raises:
            ValueError: there is no such name; the message has the nearest one and lists all.
        """
        if is_path(name):
            return imported(name)
        if name not in self:
            raise ValueError(self.missing(name))
        if name not in self._entries:
            module, _, attribute = self._builtin[name].partition(":")
            self._entries[name] = getattr(importlib.import_module(module), attribute)
        return self._entries[name]

    def missing(self, name: str) -> str:
        """Return the message for a name that is not registered."""
        if name in self.refused:
            return f"no {self.kind} named {name!r}: {self.refused[name]}"
        names = self.names()
        close, parts = nearest(name, names), name.split(".")
        if len(parts) > 1 and all(map(str.isidentifier, parts)):
            close = ":".join(name.rsplit(".", 1))
        hint = f" Did you mean {close!r}?" if close else ""
        return f"no {self.kind} named {name!r}.{hint} Known: {', '.join(names) or 'none'}."

    def build(self, spec: Mapping[str, Any] | Callable[..., Any], /, **extra: Any) -> Any:
        """Build from ``dict(type="Name", **kwargs)`` or from a callable; ``extra`` are further arguments.

        ``type`` may be a name, see `get`, or a callable.
        """
        if callable(spec):
            return spec(**extra)
        arguments = dict(spec)
        if "type" not in arguments:
            raise ValueError(f"a {self.kind} needs a 'type': dict(type=..., **options); known: {self.names()}")
        kind = arguments.pop("type")
        factory = kind if callable(kind) else self.get(kind)
        return factory(**arguments, **extra)

    def _scan(self) -> None:
        if self._package is None:
            return
        name, self._package = self._package, None
        for module in pkgutil.iter_modules(importlib.import_module(name).__path__):
            importlib.import_module(f"{name}.{module.name}")


def _home(entry: Any) -> str:
    return f"{getattr(entry, '__module__', '?')}:{getattr(entry, '__qualname__', repr(entry))}"


MODELS = Registry(
    "model",
    {
        "GPT": "colossus.models.gpt:GPT",
        "Llama": "colossus.models.gpt:Llama",
        "ViT": "colossus.models.vit:ViT",
        "WordsLM": "colossus.sparse.words_model:WordsLM",
        "hf": "colossus.convert.hf_model:hf_model",
        "torch": "colossus.convert.torch_model:torch_model",
    },
)
MODEL_OPTIONS = Registry(
    "model options",
    {
        "GPT": "colossus.models.options:GPTOptions",
        "Llama": "colossus.models.llama_options:LlamaOptions",
        "ViT": "colossus.models.vit_options:ViTOptions",
        "WordsLM": "colossus.sparse.words_options:WordsOptions",
    },
)
#: options of ``dict(type=.., **options)`` -> (our own model, the path of its weights, that of its tokenizer), or None
MODEL_SOURCES = Registry("source of models", {"hf": "colossus.hf.hf_source:resolve"})
HF_FAMILIES = Registry(
    "model type of Hugging Face",
    {
        "deepseek_v2": "colossus.hf.latent_families:DeepseekV2",
        "deepseek_v3": "colossus.hf.latent_families:DeepseekV3",
        "gemma2": "colossus.hf.gemma_families:Gemma2",
        "gemma3_text": "colossus.hf.gemma_families:Gemma3",
        "gpt2": "colossus.hf.families:GPT2",
        "gpt_oss": "colossus.hf.gpt_oss_family:GptOss",
        "llama": "colossus.hf.families:Llama",
        "mistral": "colossus.hf.families:Mistral",
        "mixtral": "colossus.hf.moe_families:Mixtral",
        "qwen3": "colossus.hf.families:Qwen3",
        "qwen3_moe": "colossus.hf.moe_families:Qwen3MoE",
        "vit": "colossus.hf.families:ViT",
    },
)
#: formats of folders with weights that are no checkpoints of ours; each recognises its folders
WEIGHT_FORMATS = Registry(
    "format of weights",
    {
        "dcp": "colossus.checkpoint.dcp_source:DistributedCheckpoint",
        "hf": "colossus.hf.hf_source:HuggingFace",
    },
)
#: formats that `colossus checkpoint convert --to` writes
WEIGHT_WRITERS = Registry(
    "form of weights",
    {
        "hf": "colossus.hf.hf_writer:to_hf",
        "dcp": "colossus.checkpoint.dcp_writer:to_dcp",
        "colossus": "colossus.checkpoint.weights_only:to_colossus",
    },
)
#: order plans without torch: config -> (a plan of it -> a lower bound of the seconds of a step)
PLAN_COSTS = Registry("cost of plans", {"least_seconds": "colossus.planner.closed_form:least_seconds"})
TENSOR_MODES = Registry("tensor mode", package="colossus.tensor_parallel.modes")
SEQUENCE_MODES = Registry(
    "sequence mode",
    {
        "ring": "colossus.sequence_parallel.modes:Ring",
        "ulysses": "colossus.sequence_parallel.modes:Ulysses",
        "hybrid": "colossus.sequence_parallel.modes:Hybrid",
    },
)
DATASETS = Registry(
    "dataset",
    {
        "Digits": "colossus.data.images:Digits",
        "Mix": "colossus.data.mix:Mix",
        "Packed": "colossus.data.documents.packed:Packed",
        "PythonStdlib": "colossus.data.text:PythonStdlib",
        "PythonStdlibWords": "colossus.data.words:PythonStdlibWords",
        "TextFolder": "colossus.data.text:TextFolder",
        "TokenFile": "colossus.data.tokens:TokenFile",
    },
)
#: torch's optimizers that update each element by itself, so that they work on a part of a parameter
TORCH_OPTIMIZERS = (
    "AdamW", "Adam", "Adagrad", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD",
)  # fmt: skip
OPTIMIZERS = Registry(
    "optimizer",
    {
        **{name: f"torch.optim.{name.lower()}:{name}" for name in TORCH_OPTIMIZERS},
        # optimizers of whole parameters
        "Adafactor": "colossus.optim.adafactor:Adafactor",
        "LAMB": "colossus.optim.trust_ratio:LAMB",
        "LARS": "colossus.optim.trust_ratio:LARS",
        "Muon": "colossus.optim.muon:Muon",
    },
    refused={
        "LBFGS": "it evaluates the loss several times in a step, but a step of many ranks does so once; use AdamW",
        "SparseAdam": "it takes only sparse gradients; set optimizer.tables = dict(type='SparseAdam') for the tables, "
        "and AdamW for the other parameters",
    },
)
#: rules of tables with sparse gradients, each with its options
TABLE_OPTIMIZERS = Registry(
    "optimizer of tables",
    {
        "SparseAdam": "colossus.sparse.table_optimizers:sparse_adam",
        "Adagrad": "colossus.sparse.table_optimizers:adagrad",
        "RowWiseAdagrad": "colossus.sparse.table_optimizers:rowwise_adagrad",
        "SGD": "colossus.sparse.table_optimizers:sgd",
    },
)
_LR_SCHEDULES = (
    "constant", "cosine", "cosine_restarts", "inverse_sqrt", "linear", "multistep", "one_cycle", "polynomial", "step",
    "wsd",
)  # fmt: skip
_TORCH_LR_SCHEDULES = (
    "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LambdaLR", "LinearLR",
    "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
LR_SCHEDULES = Registry(
    "learning-rate schedule",
    {name: f"colossus.engine.lr_schedules:{name}" for name in _LR_SCHEDULES},
    refused={name: f"use torch's by its path, torch.optim.lr_scheduler:{name}" for name in _TORCH_LR_SCHEDULES},
)
SCHEDULES = Registry(
    "schedule",
    {
        "1f1b": "colossus.schedule.builtin:one_f_one_b",
        "gpipe": "colossus.schedule.builtin:gpipe",
        "interleaved": "colossus.schedule.builtin:interleaved",
        "zb-h1": "colossus.schedule.builtin:zb_h1",
        "zb-v": "colossus.schedule.builtin:zb_v",
    },
)
STRATEGIES = Registry(
    "data-parallel strategy",
    {
        "ad-psgd": "colossus.data_parallel.gossip.ad_psgd:ADPSGD",
        "all_reduce": "colossus.data_parallel.all_reduce:AllReduce",
        "d-psgd": "colossus.data_parallel.gossip.gossip:DPSGD",
        "diloco": "colossus.data_parallel.rounds:DiLoCo",
        "hierarchical": "colossus.data_parallel.all_reduce:Hierarchical",
        "hybrid": "colossus.data_parallel.all_reduce:Hybrid",
        "local_sgd": "colossus.data_parallel.rounds:LocalSGD",
        "server": "colossus.data_parallel.servers.async_sgd:make_server",
        "sgp": "colossus.data_parallel.gossip.gossip:SGP",
        "slowmo": "colossus.data_parallel.rounds:SlowMo",
        "zero": "colossus.data_parallel.zero.zero:Zero",
    },
)
#: options of strategies, with the check that they fit the plan
STRATEGY_OPTIONS = Registry(
    "options of a data-parallel strategy",
    {
        "ad-psgd": "colossus.data_parallel.options.gossip_options:ADPSGDOptions",
        "d-psgd": "colossus.data_parallel.options.gossip_options:DPSGDOptions",
        "all_reduce": "colossus.data_parallel.options.exact_options:AllReduceOptions",
        "diloco": "colossus.data_parallel.options.strategy_options:DiLoCoOptions",
        "hierarchical": "colossus.data_parallel.options.exact_options:HierarchicalOptions",
        "hybrid": "colossus.data_parallel.options.exact_options:HybridOptions",
        "local_sgd": "colossus.data_parallel.options.strategy_options:AveragingOptions",
        "server": "colossus.data_parallel.options.server_options:ServerOptions",
        "sgp": "colossus.data_parallel.options.gossip_options:SGPOptions",
        "slowmo": "colossus.data_parallel.options.strategy_options:SlowMoOptions",
    },
)
GRAPHS = Registry("graph of replicas", package="colossus.graphs.builtin")
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "zero_centered_rmsnorm": "ZeroCenteredRMSNorm"}
NORMS = Registry("norm", {name: f"colossus.layers.norm:{kind}" for name, kind in _NORMS.items()})
_MLPS = {"gelu": "MLP", "gelu_tanh": "TanhMLP", "swiglu": "GatedMLP", "geglu_tanh": "TanhGatedMLP"}
MLPS = Registry("MLP", {name: f"colossus.layers.block:{kind}" for name, kind in _MLPS.items()})
#: hooks of `colossus.monitor.hooks`, each with its file there; `colossus.monitor.hooks.options` has their options
_MONITOR_HOOKS = {
    "BestCheckpoint": "best_checkpoint", "Callback": "callback", "CSV": "csv_file", "EMA": "averages",
    "EarlyStop": "early_stop", "Histograms": "histograms", "MLflow": "mlflow_run", "SWA": "averages",
    "TensorBoard": "tensorboard", "Throughput": "throughput", "WandB": "wandb_run",
}  # fmt: skip
HOOKS = Registry("hook", {name: f"colossus.monitor.hooks.{file}:{name}" for name, file in _MONITOR_HOOKS.items()})
HOOK_OPTIONS = Registry(
    "options of a hook", {name: f"colossus.monitor.hooks.options:{name}Options" for name in _MONITOR_HOOKS}
)
