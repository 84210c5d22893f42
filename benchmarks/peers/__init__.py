"""The same GPT and the same training step in torch alone, in several parallel forms, and in colossus."""
