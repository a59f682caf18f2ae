"""A ViT-B/16, learned by MoCo v3 on one node of A100s: 1,024 images a step, in fp32.

dslpar plan examples/plans/vit_b_moco_8_a100.py --world-size 8
"""

model = dict(type="MoCo", num_layers=12, hidden_size=768, num_heads=12)
zero = dict(stage=1)
batch = dict(global_size=1024)
cluster = dict(device="a100-80g")
