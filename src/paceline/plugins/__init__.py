"""Our drafters inside the engines that people already run. Each module knows one host, and nothing else knows it.

transformers.py   our loop, or a drafter in theirs, on a transformers model
vllm.py           drafters by name for vLLM's V1 runner
llama_cpp.py      drafters for llama-cpp-python
history.py        what the hosts that verify chains share: a drafter that reads tokens, and its rows
"""
