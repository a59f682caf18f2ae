"""ResMLP family (Touvron et al., arXiv 2105.03404): image classification with linear layers only.

It has the same modules as every family. Only `model` imports torch.
"""
