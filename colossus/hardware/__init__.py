"""The speed of devices and links, measured on a machine or taken from data sheets. No torch."""
