"""How a model is made the same under every plan: built on the meta device, then every rank draws its own values."""
