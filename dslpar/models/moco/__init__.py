"""MoCo v3 family (Chen, Xie and He, arXiv 2104.02057): a vision transformer that learns from unlabelled images.

It has the same modules as every family, and `encoder` with the layers of its two encoders. Only `model` and `encoder`
import torch.
"""
