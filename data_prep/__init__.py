"""Raw text to megatron-core's .bin/.idx: sources, tokenizers, encoding, the files and their manifest."""
