"""Hooks that a config names: each is a file, its options are in `colossus.monitor.hooks.options`."""
