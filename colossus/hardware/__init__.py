"""How fast devices and links are: as measured here, or by data sheets. No torch."""
