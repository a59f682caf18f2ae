"""dslpar: one Python file says how a model is spread over a cluster; DeepSpeed runs it."""

__version__ = "0.1.0"
