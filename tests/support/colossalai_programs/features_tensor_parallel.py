"""features/tensor_parallel/run.py: an MLP of two generic linears, whose input each rank cuts by its groups."""

import colossalai
import colossalai.nn as col_nn
import torch
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.global_variables import tensor_parallel_env as tp_env
from colossalai.utils import get_current_device, print_rank_0

CONFIG = "parallel = dict(data=1, pipeline=1, tensor=dict(size=2, mode='1d'))"


class MLP(torch.nn.Module):
    def __init__(self, dim: int = 16):
        super().__init__()
        intermediate_dim = dim * 4
        self.dense_1 = col_nn.Linear(dim, intermediate_dim)
        print_rank_0(f"Weight of the first linear layer: {self.dense_1.weight.shape}")
        self.activation = torch.nn.GELU()
        self.dense_2 = col_nn.Linear(intermediate_dim, dim)
        print_rank_0(f"Weight of the second linear layer: {self.dense_2.weight.shape}")
        self.dropout = col_nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.dense_2(self.activation(self.dense_1(x))))


def main():
    colossalai.logging.disable_existing_loggers()
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(config=args.config)
    m = MLP()
    m.eval()
    x = torch.randn((16, 16), device=get_current_device())
    torch.distributed.broadcast(x, src=0)
    if tp_env.mode == "1d":
        pass
    elif tp_env.mode == "2d":
        x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(ParallelMode.PARALLEL_2D_COL)]
        x = torch.chunk(x, 2, dim=-1)[gpc.get_local_rank(ParallelMode.PARALLEL_2D_ROW)]
    elif tp_env.mode == "2.5d":
        x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(ParallelMode.PARALLEL_2P5D_DEP)]
        x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(ParallelMode.PARALLEL_2P5D_COL)]
        x = torch.chunk(x, 2, dim=-1)[gpc.get_local_rank(ParallelMode.PARALLEL_2P5D_ROW)]
    elif tp_env.mode == "3d":
        x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(ParallelMode.PARALLEL_3D_WEIGHT)]
        x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(ParallelMode.PARALLEL_3D_INPUT)]
        x = torch.chunk(x, 2, dim=-1)[gpc.get_local_rank(ParallelMode.PARALLEL_3D_OUTPUT)]
    print_rank_0(f"Input: {x.shape}")
    x = m(x)
    # The tensor ranks together hold each element once, or in 1d each: the mean square is that of the whole output.
    total = x.detach().double().square().mean()
    torch.distributed.all_reduce(total)
    mean_square = total.item() / gpc.get_world_size(ParallelMode.GLOBAL)
    gpc.destroy()
    return [mean_square]
