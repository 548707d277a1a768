"""Our drafters inside other engines: transformers, vLLM and llama-cpp-python. Each module alone knows its host."""
