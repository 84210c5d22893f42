"""Construction of the same model under every plan: built on the meta device, then every rank draws its own values."""
