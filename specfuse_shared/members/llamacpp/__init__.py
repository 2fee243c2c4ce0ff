"""A member whose GGUF file llama.cpp runs in this process, as it is."""
