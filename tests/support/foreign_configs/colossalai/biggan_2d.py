from colossalai.amp import AMP_TYPE

TOTAL = 1024
MICRO = 64
arch = {
    resolution: {
        "in_channels": [16 // 2**i * 4 for i in range(level)],
        "attention": {2**i: 2**i in (64,) for i in range(2, level + 3)},
    }
    for level, resolution in enumerate((32, 64, 128), start=3)
}
parallel = dict(data=4, tensor=dict(size=2 * 2, mode="2d"))
fp16 = {"mode": AMP_TYPE.NAIVE, "initial_scale": 2 ** (TOTAL // MICRO)}
names = sorted(str(key) for key in arch) + ["x" * 3]
settings = dict(zip(("a", "b"), (1.5, (2, 3))), c=round(10 / 3, 2), **{"d": max(arch, key=abs)})
*first, last = range(5)
BATCH_SIZE = TOTAL // parallel["data"] if len(arch) == 3 else TOTAL
MEAN, STD = [0.5] * 3, (0.5,) * 3
TAGS = "{0}-{1:>5}".format("%03d" % 7, "z").split("-")
