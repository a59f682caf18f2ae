from libai.config import LazyCall
from libai.evaluation import PPLEvaluator

from .common.data.gpt_dataset import dataloader, tokenization
from .common.models.gpt import pretrain_model as model
from .common.models.graph import graph
from .common.optim import optim
from .common.train import train

vocab_file = "./data/vocab.json"
data_prefix = "./data/loss_compara_content_sentence"

tokenization.tokenizer.vocab_file = vocab_file
dataloader.train.dataset[0].data_prefix = data_prefix
dataloader.train.dataset[0].indexed_dataset.data_prefix = data_prefix

model.cfg.embedding_dropout_prob = 0.1
model.cfg.num_attention_heads = 16
model.cfg.hidden_size = 384
model.cfg.ffn_hidden_size = 4 * model.cfg.hidden_size
model.cfg.max_seq_length = 1024

train.input_placement_device = "cpu"
train.dist.pipeline_num_layers = model.cfg.hidden_layers

for ds in dataloader.train.dataset:
    ds.max_seq_length = model.cfg.max_seq_length

optim.lr = 1.5e-4
train.train_micro_batch_size = 4
train.amp.enabled = True
train.evaluation.evaluator = LazyCall(PPLEvaluator)()
train.output_dir = f"./output/gpt2_{model.cfg.hidden_size}"
