"""GPT family: GPT-2 by default, Llama if its fields say so.

`section` has the config keys, `layout` the divisibility conditions and the layer weights, `costs` the
communication, memory and compute, `rules` the lint rules of its fields, and `model` the layers. Only `model` imports
torch.
"""
