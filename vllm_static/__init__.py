"""The vLLM plugin: a structured-output backend called `static` whose grammar is a finite item set."""
