"""The config file: its schema, how it is loaded, and whether its plan fits the processes and the model. No torch."""

from colossus.config.errors import ConfigError
from colossus.config.loading import load_config, resolve, state_config
from colossus.config.plans import model_options, resolve_sizes
from colossus.config.printed import as_dict, as_source, by_path, without_credentials
from colossus.config.schema import Config
from colossus.config.section import Named

__all__ = [
    "Config",
    "ConfigError",
    "Named",
    "as_dict",
    "as_source",
    "by_path",
    "load_config",
    "model_options",
    "resolve",
    "resolve_sizes",
    "state_config",
    "without_credentials",
]
