"""Name -> class tables, in which all names of config files are looked up, each with the class of its options.

Entries are classes registered with the decorator; built-in ones declared as ``"package.module:attribute"`` and imported
on first use, so that listing names imports no torch; and the classes that the modules of ``package`` register. A config
may also write ``"package.module:attribute"`` in place of a name. Classes of options, declared in the same way, import
no torch: `colossus.config.components` checks a config against them before a process starts.
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
        builtin: Mapping[str, str | tuple[str, str]] | None = None,
        *,
        package: str | None = None,
        refused: Mapping[str, str] | None = None,
        passed: tuple[str, ...] = (),
    ) -> None:
        """Make a table.

        Args:
            kind: the kind of its entries, for messages.
            builtin: name -> ``"package.module:attribute"``, or a pair of these: the entry, and its options.
            package: the package whose modules register classes.
            refused: names that people expect -> why there is no such entry, and the alternative.
            passed: arguments of entries that the package passes, so that they are no options.
        """
        self.kind, self.passed = kind, passed
        self.refused = dict(refused or {})
        pairs = {name: (path, "") if isinstance(path, str) else path for name, path in (builtin or {}).items()}
        self._builtin = {name: path for name, (path, _) in pairs.items()}
        self._package = package
        self._entries: dict[str, Any] = {}
        #: name -> the class of its options, or its path
        self._options: dict[str, Any] = {name: path for name, (_, path) in pairs.items() if path}

    def register(self, name: str | None = None, *, options: Any = None) -> Callable[[T], T]:
        """Return a decorator: ``@MODELS.register()`` uses the class name, ``@MODELS.register("gpt")`` another one.

        Args:
            name: the name.
            options: the class of its options, which is called with them and raises ValueError for wrong ones; None:
                they are the arguments of the class.

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
            if options is not None:
                self._options[key] = options
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
            self._entries[name] = _attribute(self._builtin[name])
        return self._entries[name]

    def options(self, name: str) -> Any:
        """Return the class of the options of a name; None if none is declared."""
        self._scan()
        options = self._options.get(name)
        if isinstance(options, str):
            options = self._options[name] = _attribute(options)
        return options

    def name_of(self, entry: Any) -> str | None:
        """Return the name of a class or function; no built-in class is imported."""
        self._scan()
        registered = {_home(other): name for name, other in self._entries.items()}
        return ({path: name for name, path in self._builtin.items()} | registered).get(_home(entry))

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


def _attribute(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _home(entry: Any) -> str:
    return f"{getattr(entry, '__module__', '?')}:{getattr(entry, '__qualname__', repr(entry))}"


MODELS = Registry(
    "model",
    {
        "GPT": ("colossus.models.gpt:GPT", "colossus.models.options:GPTOptions"),
        "Llama": ("colossus.models.gpt:Llama", "colossus.models.llama_options:LlamaOptions"),
        "ViT": ("colossus.models.vit:ViT", "colossus.models.vit_options:ViTOptions"),
        "WordsLM": ("colossus.sparse.words_model:WordsLM", "colossus.sparse.words_options:WordsOptions"),
        "hf": ("colossus.convert.hf_model:hf_model", "colossus.convert.converted_options:HFOptions"),
        "torch": ("colossus.convert.torch_model:torch_model", "colossus.convert.converted_options:TorchOptions"),
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
#: formats of folders with weights that are no checkpoints of ours; each recognises its folders, asked by name's order
WEIGHT_FORMATS = Registry("format of weights", {
    "dcp": "colossus.checkpoint.dcp_folder:DISTRIBUTED_CHECKPOINT",
    "deepspeed": "colossus.hf.hf_source:UNIVERSAL_CHECKPOINT", "hf": "colossus.hf.hf_source:HUGGING_FACE",
})  # fmt: skip
ADAPTER_FORMATS = Registry("format of adapters", {"peft": "colossus.hf.lora_folder:LoRAReader"})
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
    {name: f"colossus.sequence_parallel.modes:{name.capitalize()}" for name in ("ring", "ulysses", "hybrid")},
)
_DATASETS = {
    "Digits": "images", "Mix": "mix", "Packed": "documents.packed", "PythonStdlib": "text",
    "PythonStdlibWords": "words", "TextFolder": "text", "TokenFile": "tokens",
}  # fmt: skip
DATASETS = Registry(
    "dataset",
    {
        name: (f"colossus.data.{file}:{name}", f"colossus.data.dataset_options:{name}Options")
        for name, file in _DATASETS.items()
    },
)
#: torch's optimizers that update each element by itself, so that they work on a part of a parameter
TORCH_OPTIMIZERS = (
    "AdamW", "Adam", "Adagrad", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD",
)  # fmt: skip
OPTIMIZERS = Registry(
    "optimizer",
    {
        **{
            name: (f"torch.optim.{name.lower()}:{name}", f"colossus.optim.torch_options:{name}Options")
            for name in TORCH_OPTIMIZERS
        },
        # optimizers of whole parameters
        "Adafactor": ("colossus.optim.adafactor:Adafactor", "colossus.optim.optimizer_options:AdafactorOptions"),
        "LAMB": ("colossus.optim.trust_ratio:LAMB", "colossus.optim.optimizer_options:LAMBOptions"),
        "LARS": ("colossus.optim.trust_ratio:LARS", "colossus.optim.optimizer_options:LARSOptions"),
        "Muon": ("colossus.optim.muon:Muon", "colossus.optim.optimizer_options:MuonOptions"),
    },
    passed=("params", "holders", "named_parameters", "lr"),
    refused={
        "LBFGS": "it evaluates the loss several times in a step, but a step of many ranks does so once; use AdamW",
        "SparseAdam": "it takes only sparse gradients; set optimizer.tables = dict(type='SparseAdam') for the tables, "
        "and AdamW for the other parameters",
    },
)
#: rules of tables with sparse gradients, each by its options, which make the rule
TABLE_OPTIMIZERS = Registry(
    "optimizer of tables",
    {
        name: (f"colossus.sparse.table_options:{name}Options", f"colossus.sparse.table_options:{name}Options")
        for name in ("SparseAdam", "Adagrad", "RowWiseAdagrad", "SGD")
    },
)
_LR_SCHEDULES = (
    "constant", "cosine", "cosine_restarts", "inverse_sqrt", "linear", "multistep", "polynomial", "step", "wsd",
)  # fmt: skip
_TORCH_LR_SCHEDULES = (
    "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LambdaLR", "LinearLR",
    "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
LR_SCHEDULES = Registry(
    "learning-rate schedule",
    {name: f"colossus.engine.lr_schedules:{name}" for name in _LR_SCHEDULES},
    refused={name: f"use torch's by its path, torch.optim.lr_scheduler:{name}" for name in _TORCH_LR_SCHEDULES}
    | {"one_cycle": "use torch's, torch.optim.lr_scheduler:OneCycleLR, with max_lr and total_steps"},
    passed=("optimizer", "progress", "min_ratio", "step", "schedule_steps", "warmup_steps", "lr"),
)
_SCHEDULES = {"1f1b": "one_f_one_b", "gpipe": "gpipe", "interleaved": "interleaved", "zb-h1": "zb_h1", "zb-v": "zb_v"}
SCHEDULES = Registry(
    "schedule",
    {name: f"colossus.schedule.builtin:{function}" for name, function in _SCHEDULES.items()},
    passed=("stages", "microbatches"),
)
#: strategy -> its class below `colossus.data_parallel`, and its options below `colossus.data_parallel.options`
_STRATEGIES = {
    "ad-psgd": ("gossip.ad_psgd:ADPSGD", "gossip_options:ADPSGDOptions"),
    "all_reduce": ("all_reduce:AllReduce", "exact_options:AllReduceOptions"),
    "d-psgd": ("gossip.gossip:DPSGD", "gossip_options:DPSGDOptions"),
    "diloco": ("rounds:DiLoCo", "strategy_options:DiLoCoOptions"),
    "hierarchical": ("all_reduce:Hierarchical", "exact_options:HierarchicalOptions"),
    "hybrid": ("all_reduce:Hybrid", "exact_options:HybridOptions"),
    "local_sgd": ("rounds:LocalSGD", "strategy_options:AveragingOptions"),
    "server": ("servers.async_sgd:make_server", "server_options:ServerOptions"),
    "sgp": ("gossip.gossip:SGP", "gossip_options:SGPOptions"),
    "slowmo": ("rounds:SlowMo", "strategy_options:SlowMoOptions"),
    "zero": ("zero.zero:Zero", "exact_options:ZeroOptions"),
}
STRATEGIES = Registry(
    "data-parallel strategy",
    {
        name: (f"colossus.data_parallel.{strategy}", f"colossus.data_parallel.options.{options}")
        for name, (strategy, options) in _STRATEGIES.items()
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
HOOKS = Registry(
    "hook",
    {
        name: (f"colossus.monitor.hooks.{file}:{name}", f"colossus.monitor.hooks.options:{name}Options")
        for name, file in _MONITOR_HOOKS.items()
    },
)
