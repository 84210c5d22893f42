"""Hooks that a config names. Each is a file; the options of its class are in `colossus.monitor.hooks.options`."""
