"""The families of Hugging Face's models that colossus reads and writes: one file each."""
