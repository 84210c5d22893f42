"""Models without colossus: plain ``torch.nn`` modules, and folders that need nothing but torch."""
