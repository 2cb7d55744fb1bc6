"""Launch lines of inference engines: a serving plan as the commands that start vLLM, SGLang or TensorRT-LLM.

``engines.toml`` says which models and formats each engine knows; ``flags.py`` writes the flags of one instance.
"""
