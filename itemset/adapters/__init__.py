"""Item sets in decoders that are not engines: an own loop, Hugging Face's `generate()`."""
