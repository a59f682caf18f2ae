"""The GPT family: GPT-2, and by its fields Llama.

`section` is what a config says of it, `layout` what divides by what and what a pipeline weighs, `costs` what it sends,
holds and computes, `rules` the lint rules of its fields, `model` its layers. Only `model` imports torch.
"""
