"""The MoCo family (v3; Chen, Xie and He, arXiv 2104.02057): a vision transformer that learns from images alone.

The modules are those of every family; `encoder` has the two encoders' layers. Only `model` and `encoder` import torch.
"""
