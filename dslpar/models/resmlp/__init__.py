"""The ResMLP family (Touvron et al., arXiv 2105.03404): images told apart by linear layers alone.

The modules are those of every family; only `model` imports torch.
"""
