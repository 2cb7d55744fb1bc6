"""Launch lines of inference engines: a serving plan as the commands that start vLLM, SGLang or TensorRT-LLM.

``engines.toml`` says which models and formats each engine knows; ``flags.py`` writes the flags of one instance.
"""

from shapewright.app.formats.servers.launch import ENGINES as ENGINES
from shapewright.app.formats.servers.launch import Launch as Launch
from shapewright.app.formats.servers.launch import choose_expressible as choose_expressible
from shapewright.app.formats.servers.launch import find_engine as find_engine
from shapewright.app.formats.servers.launch import write_launch as write_launch
