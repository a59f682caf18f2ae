"""language/knowledge_graph_embedding/train.py: two modes of call, a loss of three values."""

import colossalai
import torch
from colossalai.logging import get_dist_logger
from colossalai.utils import get_dataloader

CONFIG = dict()


class KGEModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.entity_embedding = torch.nn.Parameter(0.1 * torch.randn(16, 4))
        self.relation_embedding = torch.nn.Parameter(0.1 * torch.randn(3, 4))

    def forward(self, sample, mode="single"):
        head, relation, tail = sample.unbind(-1)
        ahead = self.entity_embedding[head] + self.relation_embedding[relation]
        return -(ahead - self.entity_embedding[tail]).abs().sum(-1) if mode == "single" else ahead


class EmbeddingLoss(torch.nn.Module):
    def forward(self, positive, negative, weight):
        return (torch.nn.functional.softplus(-positive) * weight).mean() + torch.nn.functional.softplus(negative).mean()


def main():
    parser = colossalai.get_default_parser()
    parser.add_argument("--max_steps", default=12, type=int)
    args = parser.parse_args()
    colossalai.launch_from_torch(config=CONFIG)
    logger = get_dist_logger()
    heads = torch.arange(16)
    triples = torch.stack([heads, heads % 3, (heads + 1) % 16], -1)
    loader = get_dataloader(dataset=torch.utils.data.TensorDataset(triples), shuffle=True, batch_size=8)
    model = KGEModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    engine, _, _, _ = colossalai.initialize(model=model, optimizer=optimizer, criterion=EmbeddingLoss())
    losses = []
    while len(losses) < args.max_steps:
        for (sample,) in loader:
            engine.train()
            engine.zero_grad()
            wrong = sample.clone()
            wrong[:, 2] = (wrong[:, 2] + 5) % 16
            loss = engine.criterion(engine(sample), engine(wrong, mode="single"), torch.ones(len(sample)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    logger.info(f"loss {losses[-1]}", ranks=[0])
    state = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save(state, "checkpoint")
    return losses
