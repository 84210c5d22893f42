"""Hooks that a config names: each is a file, and takes the options of its class in `colossus.monitor.hooks.options`."""
